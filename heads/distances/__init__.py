"""One distance per file."""
