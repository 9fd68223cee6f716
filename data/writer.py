"""The dataset folder, as it is written: to temporary names first, then published together. Read by data/token_file.py."""

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np

from data.token_file import DTYPES, DatasetMeta

PARTIAL = ".partial-"  # the folder of unfinished files, inside the dataset's
COPY_BYTES = 1 << 24


class DatasetWriter:
    """Appends ids to the two splits of a dataset that nobody can see until `publish`.

    Use it as a context: leaving without `publish` removes what was written. After a kill, the remains (a folder whose name
    begins with `.partial-`) are removed by the next writer.
    """

    def __init__(self, folder: Path, dtype: str):
        self.folder = folder
        self.dtype = DTYPES[dtype]
        self.tokens = {"train": 0, "val": 0}
        self.max_id = 0

    def __enter__(self) -> "DatasetWriter":
        self.created = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        for remains in self.folder.glob(PARTIAL + "*"):
            shutil.rmtree(remains)
        self.partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=self.folder))
        self.files = {split: open(self._path(split), "w+b") for split in self.tokens}
        return self

    def __exit__(self, *exception) -> None:
        try:
            self._close()
        finally:  # closing writes what is left, which fails again on a full disk
            shutil.rmtree(self.partial, ignore_errors=True)
            for folder in self.created:
                if not any(folder.iterdir()):
                    folder.rmdir()

    def _close(self) -> None:
        for file in self.files.values():
            file.close()

    def append(self, split: str, ids: np.ndarray) -> None:
        """Adds ids (n,) of the dataset's dtype to the end of a split."""
        self.files[split].write(ids.tobytes())
        self.tokens[split] += len(ids)
        self.max_id = max(self.max_id, int(ids.max(initial=0)))

    def move(self, split: str, start: int, stop: int) -> np.ndarray:
        """Takes the tokens [start, stop) out of a split, adds them to the end of the other, and returns them."""
        width, file = self.dtype.itemsize, self.files[split]
        file.seek(start * width)
        moved = np.frombuffer(file.read((stop - start) * width), dtype=self.dtype)
        for at in range(stop * width, self.tokens[split] * width, COPY_BYTES):
            file.seek(at)
            block = file.read(COPY_BYTES)
            file.seek(at - len(moved) * width)
            file.write(block)
        self.tokens[split] -= len(moved)
        file.truncate(self.tokens[split] * width)
        file.seek(0, os.SEEK_END)
        self.append("val" if split == "train" else "train", moved)
        return moved

    def publish(self, **facts) -> DatasetMeta:
        """Writes the meta files and gives everything its final name; `facts` are DatasetMeta's fields that the writer cannot know.

        The old train.bin goes first and the new one comes last, so that a folder with a train.bin is whole at every moment.
        """
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        self._close()
        meta = DatasetMeta(
            dtype=self.dtype.name,
            max_id=self.max_id,
            train_tokens=self.tokens["train"],
            val_tokens=self.tokens["val"],
            checksum=checksum(self._path("train"), self._path("val")),
            **facts,
        )
        text = json.dumps(dataclasses.asdict(meta), indent=2, ensure_ascii=False, allow_nan=False)
        (self.partial / "meta.json").write_text(text + "\n", encoding="utf-8")
        (self.partial / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": meta.vocab_size}))
        (self.folder / "train.bin").unlink(missing_ok=True)
        for name in ("val.bin", "meta.pkl", "meta.json", "train.bin"):
            os.replace(self.partial / name, self.folder / name)
        return meta

    def _path(self, split: str) -> Path:
        return self.partial / f"{split}.bin"


def checksum(train: Path, val: Path) -> str:
    """sha256 of the bytes of train.bin followed by those of val.bin."""
    digest = hashlib.sha256()
    for path in (train, val):
        with open(path, "rb") as file:
            while block := file.read(COPY_BYTES):
                digest.update(block)
    return "sha256:" + digest.hexdigest()
