"""From text to batches: sources -> tokenizers -> token files (prepare), and token files -> batches (loader, masking)."""
