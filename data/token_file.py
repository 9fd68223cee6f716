"""The dataset folder, as it is read: flat files of token ids and the meta.json that describes them.

    train.bin, val.bin   token ids, little-endian uint16 or uint32, no header
    meta.json            dtype, vocabulary, tokenizer, counts, source, checksum (authoritative)
    meta.pkl             {"vocab_size": ...}, for nanoGPT's tools

Folders that nanoGPT prepared (no meta.json) are read as they are. Folders are written by data/writer.py.
"""

import dataclasses
import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from commands import InputError

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
LFS_POINTER = b"version https://git-lfs"
SCAN_LIMIT = 1 << 28  # bytes; files up to here are scanned for their largest id whenever they are opened (about 0.1 s)
SCAN_BLOCK = 1 << 22  # ids per step of a scan
NANOGPT_VOCABULARY = 50257  # GPT-2 BPE, what nanoGPT's own scripts use where they write no meta.pkl
NANOGPT_EOT = 50256


@dataclass(frozen=True)
class DatasetMeta:
    """What meta.json says about a dataset. Counts are None where nobody counted (nanoGPT's folders)."""

    dtype: str  # "uint16" or "uint32"
    vocab_size: int  # ids that can be targets
    max_id: int  # the largest id in the files
    train_tokens: int
    val_tokens: int
    mask_token_id: int  # for masked-LM inputs
    tokenizer: str | None = None  # what data.tokenizers.load_tokenizer takes
    eot_id: int | None = None  # placed after each document
    special_ids: tuple[int, ...] = ()  # never masked, never a random replacement
    train_bytes: int | None = None  # UTF-8 bytes of the text, without end-of-text ids
    val_bytes: int | None = None
    train_documents: int | None = None
    val_documents: int | None = None
    dropped_documents: int | None = None  # empty or null
    source: str | None = None
    checksum: str | None = None  # sha256 of train.bin followed by val.bin
    settings: dict = field(default_factory=dict)  # how it was prepared; equal settings mean equal data

    @classmethod
    def from_dict(cls, values: dict) -> "DatasetMeta":
        """The meta that `dataclasses.asdict` gave. Raises InputError naming the entry that is missing or wrong."""
        known = {item.name: item for item in dataclasses.fields(cls)}
        meta = {name: value for name, value in values.items() if name in known}
        for name, item in known.items():
            required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
            if required and name not in meta:
                raise InputError(f"`{name}` is missing")
            if item.type in (int, int | None) and not isinstance(meta.get(name), int if required else int | None):
                raise InputError(f"`{name}` must be a whole number, not {meta[name]!r}")
        if meta["dtype"] not in DTYPES:
            raise InputError(f"`dtype` must be one of {', '.join(DTYPES)}, not {meta['dtype']!r}")
        meta["special_ids"] = tuple(meta.get("special_ids", ()))
        return cls(**meta)


class TokenFile:
    """One file of token ids. Reading maps the file anew each time, so that no page and no handle stays with the process.

    `file[a:b]` gives int64 ids (b - a,); `rows(starts, length)` gives int64 (len(starts), length).
    Raises InputError where the file ends early or holds an id outside the vocabulary.
    """

    def __init__(self, path: Path, dtype: str, vocab_size: int):
        self.path = path
        self.dtype = DTYPES[dtype]
        self.vocab_size = vocab_size
        self.tokens = path.stat().st_size // self.dtype.itemsize

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, window: slice) -> np.ndarray:
        start, stop, stride = window.indices(self.tokens)
        return self.rows([start], max(0, stop - start))[0][::stride]

    def rows(self, starts, length: int) -> np.ndarray:
        if length == 0:
            return np.empty((len(starts), 0), dtype=np.int64)
        ids = np.memmap(self.path, dtype=self.dtype, mode="r")
        rows = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(rows, starts, strict=True):
            window = ids[start : start + length]
            if len(window) < length:
                raise InputError(f"{self.path} has shrunk: {len(ids)} tokens where {self.tokens} were; prepare it again")
            row[:] = window
        if rows.size and rows.max() >= self.vocab_size:
            raise InputError(f"{self.path} holds id {rows.max()}, outside its vocabulary of {self.vocab_size}; prepare it again")
        return rows

    def max_id(self) -> int:
        """The largest id in the file (one pass in blocks), -1 if it is empty."""
        largest = -1
        for start in range(0, self.tokens, SCAN_BLOCK):
            ids = np.memmap(self.path, dtype=self.dtype, mode="r")
            largest = max(largest, int(ids[start : start + SCAN_BLOCK].max()))
        return largest


@dataclass(frozen=True)
class Dataset:
    folder: Path
    meta: DatasetMeta
    train: TokenFile
    val: TokenFile


def open_dataset(folder: str | Path) -> Dataset:
    """Opens and checks a dataset folder.

    Raises InputError (one line: what, where, what to do) for missing files, Git LFS pointers, sizes that disagree with
    meta.json or with the width of an id, and ids beyond the vocabulary.
    """
    folder = Path(folder)
    if not (folder / "meta.json").exists():
        return _open_nanogpt(folder)
    meta = read_meta(folder)
    files = {}
    for split, tokens in (("train", meta.train_tokens), ("val", meta.val_tokens)):
        path = _checked(folder, split, meta.dtype)
        files[split] = TokenFile(path, meta.dtype, meta.vocab_size)
        if len(files[split]) != tokens:
            raise InputError(
                f"{path} holds {len(files[split])} tokens where meta.json says {tokens}: it is truncated or from another dataset; "
                f"prepare it again ({_prepare_command(folder)} --overwrite)"
            )
    small = [file for file in files.values() if path_size(file.path) <= SCAN_LIMIT]
    _check_ids(folder, max([meta.max_id, *(file.max_id() for file in small)]), meta.vocab_size)
    return Dataset(folder, meta, files["train"], files["val"])


def read_meta(folder: Path) -> DatasetMeta:
    """Reads folder/meta.json. Raises InputError if it is not the JSON object that it should be."""
    path = folder / "meta.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise InputError("not a JSON object")
        return DatasetMeta.from_dict(values)
    except ValueError as error:  # InputError is one of these, malformed JSON and invalid UTF-8 are the others
        raise InputError(f"{path}: {error}; prepare the dataset again") from None


class _PlainUnpickler(pickle.Unpickler):
    """Admits numbers, strings and plain containers; a pickle that names any class or function is refused."""

    def find_class(self, module, name):
        raise InputError(f"it asks for {module}.{name}, and only plain containers are read")


def read_pickle(path: Path) -> dict:
    """A nanoGPT meta.pkl. Raises InputError if it is damaged or holds anything but plain containers."""
    try:
        with open(path, "rb") as file:
            values = _PlainUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds a {type(values).__name__}, not a dict")
    return values


def _open_nanogpt(folder: Path) -> Dataset:
    """A folder that nanoGPT's scripts wrote: uint16, vocabulary from meta.pkl or GPT-2's, one scan for the largest id."""
    paths = [_checked(folder, split, "uint16") for split in ("train", "val")]
    pickled = read_pickle(folder / "meta.pkl") if (folder / "meta.pkl").exists() else {}
    vocab_size = pickled.get("vocab_size", NANOGPT_VOCABULARY)
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise InputError(f"{folder / 'meta.pkl'}: vocab_size must be a positive whole number, not {vocab_size!r}")
    train, val = (TokenFile(path, "uint16", vocab_size) for path in paths)
    max_id = max(train.max_id(), val.max_id())
    _check_ids(folder, max_id, vocab_size)
    characters = "itos" in pickled  # nanoGPT's character datasets; the others are GPT-2 BPE
    bpe = not characters and vocab_size >= NANOGPT_VOCABULARY
    meta = DatasetMeta(
        dtype="uint16",
        vocab_size=vocab_size,
        max_id=max_id,
        train_tokens=len(train),
        val_tokens=len(val),
        mask_token_id=vocab_size,
        tokenizer=str((folder / "meta.pkl").resolve()) if characters else "gpt2" if bpe else None,
        eot_id=NANOGPT_EOT if bpe else None,
        special_ids=(NANOGPT_EOT,) if bpe else (),
        source="prepared for nanoGPT",
    )
    return Dataset(folder, meta, train, val)


def _checked(folder: Path, split: str, dtype: str) -> Path:
    """The path of a split's file, once it is known to be there, to be no Git LFS pointer and to hold whole ids."""
    path = folder / f"{split}.bin"
    if not path.is_file():
        raise InputError(f"no dataset at {folder}: {path} is missing; prepare it with `{_prepare_command(folder)}`")
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise InputError(f"{path} is a Git LFS pointer, not token ids: fetch it with `git lfs pull`")
    width = DTYPES[dtype].itemsize
    if path_size(path) % width:
        raise InputError(f"{path} has {path_size(path)} bytes, no multiple of {width} ({dtype}): it is truncated; prepare it again")
    return path


def _check_ids(folder: Path, max_id: int, vocab_size: int) -> None:
    if max_id >= vocab_size:
        raise InputError(f"{folder} holds id {max_id}, outside its vocabulary of {vocab_size}: files and meta disagree; prepare it again")


def _prepare_command(folder: Path) -> str:
    return f"python -m data.prepare SOURCE --tokenizer NAME --out {folder}"


def path_size(path: Path) -> int:
    return path.stat().st_size
