"""Progress of long work on text."""

import sys
import time

LINE_SECONDS = 10


class Progress:
    """Bytes of text done: a bar on a terminal, otherwise a plain line every ten seconds."""

    def __init__(self, what: str, total: int | None):
        self.what, self.total, self.done, self.printed = what, total, 0, time.monotonic()
        self.bar = None

    def __enter__(self) -> "Progress":
        if sys.stdout.isatty():
            from tqdm import tqdm

            self.bar = tqdm(desc=self.what, total=self.total, unit="B", unit_scale=True)
        return self

    def __exit__(self, *exception) -> None:
        if self.bar is not None:
            self.bar.close()

    def add(self, n_bytes: int) -> None:
        self.done += n_bytes
        if self.bar is not None:
            self.bar.update(n_bytes)
        elif time.monotonic() - self.printed >= LINE_SECONDS:
            self.printed = time.monotonic()
            of_total = f" of {self.total / 1e6:.1f}" if self.total else ""
            print(f"{self.what}: {self.done / 1e6:.1f}{of_total} MB", flush=True)
