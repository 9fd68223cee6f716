"""What a dataset folder holds: its numbers, and the beginning of each split as text.

    python -m data.inspect data/pydocs
"""

import argparse
from pathlib import Path

from commands import InputError, Parser, command
from data.token_file import Dataset, TokenFile, open_dataset
from data.tokenizers import load_tokenizer
from data.writer import checksum

SAMPLE_TOKENS = 60


def describe(dataset: Dataset) -> list[tuple[str, str]]:
    """What the meta says, as (name, value) rows; "unknown" where nobody recorded it."""
    meta = dataset.meta
    rows = [
        ("source", meta.source or "unknown"),
        ("tokenizer", meta.tokenizer or "unknown"),
        ("vocabulary", f"{meta.vocab_size:,} ids, the largest in use {meta.max_id:,}; {meta.dtype}"),
        ("end of text", "none" if meta.eot_id is None else f"id {meta.eot_id:,}, after each document"),
        ("mask id", f"{meta.mask_token_id:,}"),
    ]
    for split in ("train", "val"):
        tokens, documents, n_bytes = (getattr(meta, f"{split}_{what}") for what in ("tokens", "documents", "bytes"))
        text = f"{tokens:,} tokens"
        if documents is not None:
            text += f", {documents:,} documents, {n_bytes:,} bytes of text"
        if tokens and n_bytes:
            text += f" ({n_bytes / tokens:.2f} bytes per token)"
        rows.append((split, text))
    rows.append(("dropped", "unknown" if meta.dropped_documents is None else f"{meta.dropped_documents:,} empty or null documents"))
    rows.append(("checksum", meta.checksum or "none"))
    return rows


def sample(tokens: TokenFile, tokenizer, n_tokens: int) -> str:
    """The first `n_tokens` of a split as text on one line, line ends and other controls escaped."""
    return repr(tokenizer.decode(tokens[:n_tokens]))


def main(argv: list[str]) -> None:
    parser = Parser(prog="python -m data.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the dataset folder")
    parser.add_argument("--tokens", type=int, default=SAMPLE_TOKENS, help=f"how much of each split to show as text ({SAMPLE_TOKENS})")
    parser.add_argument("--verify", action="store_true", help="read everything: compare the checksum, look for ids beyond the vocabulary")
    args = parser.parse_args(argv)
    dataset = open_dataset(args.folder)
    print(args.folder)
    for name, value in describe(dataset):
        print(f"  {name:<12}{value}")
    if args.verify:
        verify(dataset)
        state = "right" if dataset.meta.checksum else "not recorded"
        print(f"  {'verified':<12}every id is in the vocabulary, and the checksum is {state}")
    show(dataset, args.tokens)


def verify(dataset: Dataset) -> None:
    """Reads both files whole. Raises InputError if an id or the checksum is not what the meta says."""
    meta = dataset.meta
    largest = max(dataset.train.max_id(), dataset.val.max_id())
    if largest != meta.max_id:
        raise InputError(f"{dataset.folder}: the largest id is {largest}, where its meta says {meta.max_id}; prepare it again")
    if meta.checksum and checksum(dataset.train.path, dataset.val.path) != meta.checksum:
        raise InputError(f"{dataset.folder}: the files are not those that were prepared (another checksum); prepare it again")


def show(dataset: Dataset, n_tokens: int) -> None:
    """Prints the beginning of each split; a tokenizer that cannot be had costs the text only."""
    if dataset.meta.tokenizer is None:
        print("  (no tokenizer is recorded, so no text can be shown)")
        return
    try:
        tokenizer = load_tokenizer(dataset.meta.tokenizer)
    except InputError as error:
        print(f"  (no text can be shown: {error})")
        return
    for split in ("train", "val"):
        print(f"  {split + ' text':<12}{sample(getattr(dataset, split), tokenizer, n_tokens)}")


if __name__ == "__main__":
    command(main)
