"""Prepares a dataset folder: documents from a source, encoded, split into training and validation, written whole or not at all.

    python -m data.prepare pydocs --tokenizer bytes --out data/pydocs
    python -m data.prepare my_texts/ --tokenizer gpt2 --out data/mine
    python -m data.prepare openwebtext --out data/openwebtext

One end-of-text id follows each document. A document's seeded hash decides its split, so the split is reproducible and equal
texts stay together. Nothing appears in the folder before everything is written.
"""

import argparse
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from commands import InputError, Parser, command
from data.encoding import Encoded, encoded, parts
from data.progress import Progress
from data.sources import Source, SourceOptions, open_source
from data.token_file import DatasetMeta, open_dataset
from data.tokenizers import load_tokenizer, tokenizer_identity
from data.writer import DatasetWriter

VAL_FRACTION = 0.05
OPENWEBTEXT_VAL_FRACTION = 0.0005  # nanoGPT's: 4 million tokens of 9 billion
UINT16_IDS = 1 << 16
SMALL_SOURCE = 1 << 22  # bytes; below, starting worker processes takes longer than the work
MOST_WORKERS = 8
DECODE_TOKENS = 1 << 16  # at a time, when the bytes of a part of a document are counted


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the dataset will be; equal recipes give equal data."""

    source: str
    tokenizer: str = "gpt2"
    val_fraction: float = VAL_FRACTION
    seed: int = 1337
    options: SourceOptions = SourceOptions()

    def settings(self, source: Source) -> dict:
        """The recipe as meta.json records it, with what identifies the files behind the names."""
        return {
            "source": source.identity,
            "tokenizer": tokenizer_identity(self.tokenizer),
            "val_fraction": self.val_fraction,
            "seed": self.seed,
            **dataclasses.asdict(self.options),
        }


class Document(NamedTuple):
    """Where a written document stands in its split."""

    share: float
    start: int  # tokens
    stop: int
    n_bytes: int


class Ledger:
    """Writes encoded parts to their splits, counts them, and remembers the document that a split would give to the other."""

    def __init__(self, writer: DatasetWriter, val_fraction: float):
        self.writer, self.val_fraction = writer, val_fraction
        self.documents = {"train": 0, "val": 0}
        self.n_bytes = {"train": 0, "val": 0}
        self.candidate: dict[str, Document] = {}  # train: smallest share, val: largest
        self.start = 0

    def add(self, part: Encoded) -> None:
        split = "val" if part.share < self.val_fraction else "train"
        if part.first:
            self.start, self.document_bytes = self.writer.tokens[split], 0
        self.writer.append(split, part.ids)
        self.n_bytes[split] += part.n_bytes
        self.document_bytes += part.n_bytes
        if part.last:
            self.documents[split] += 1
            document = Document(part.share, self.start, self.writer.tokens[split], self.document_bytes)
            choose = min if split == "train" else max
            self.candidate[split] = choose(self.candidate.get(split, document), document, key=lambda d: d.share)

    def fill_empty_split(self, tokenizer) -> str | None:
        """With a fraction strictly between 0 and 1 both splits get something. Returns what had to be done for it, in words."""
        empty = [split for split, count in self.documents.items() if count == 0]
        if not empty or not 0 < self.val_fraction < 1:
            return None
        (empty,) = empty
        full = "val" if empty == "train" else "train"
        if sum(self.documents.values()) == 1:
            return self._split_tokens(full, empty, tokenizer)
        document = self.candidate[full]
        self.writer.move(full, document.start, document.stop)
        self._book(full, empty, document.n_bytes)
        self.documents[full] -= 1
        return f"the hash gave {empty} no document: it got the one with the {'smallest' if empty == 'val' else 'largest'} hash"

    def _split_tokens(self, full: str, empty: str, tokenizer) -> str:
        n = self.writer.tokens[full]
        n_val = min(max(1, round(self.val_fraction * n)), n - 1)
        moved = self.writer.move(full, *((n - n_val, n) if empty == "val" else (0, n - n_val)))
        text = moved[moved != tokenizer.eot_id]
        blocks = (text[at : at + DECODE_TOKENS] for at in range(0, len(text), DECODE_TOKENS))
        self._book(full, empty, sum(len(tokenizer.decode_bytes(block)) for block in blocks))
        return f"there is only one document: its last {n_val:,} tokens are the validation split"

    def _book(self, full: str, empty: str, n_bytes: int) -> None:
        self.n_bytes[full] -= n_bytes
        self.n_bytes[empty] += n_bytes
        self.documents[empty] += 1


def prepare(recipe: Recipe, out: Path, workers: int = 1, overwrite: bool = False) -> DatasetMeta:
    """Writes the dataset of `recipe` to the folder `out`, or finds it there already.

    Raises InputError for anything wrong with the input (and for other data in `out`, unless `overwrite`), RunFailed if a
    worker dies; the folder is then as it was.
    """
    source = open_source(recipe.source, recipe.options)
    settings = recipe.settings(source)
    if not overwrite and (finished := _finished(out, settings)):
        return finished
    tokenizer = load_tokenizer(recipe.tokenizer)  # first: the reading may take hours, and this may fail
    if tokenizer.eot_id is None:
        raise InputError(f"tokenizer {tokenizer.name} has no end-of-text id, so that documents cannot be kept apart")
    dtype = "uint16" if tokenizer.vocab_size <= UINT16_IDS else "uint32"
    if tokenizer.name == "bytes" or (source.size or SMALL_SOURCE) < SMALL_SOURCE:
        workers = 1
    dropped = []
    with DatasetWriter(out, dtype) as writer, Progress(f"encoding {source.name}", source.size) as progress:
        ledger = Ledger(writer, recipe.val_fraction)
        for part in encoded(parts(source.documents(), recipe.seed, dropped), tokenizer, dtype, workers):
            ledger.add(part)
            progress.add(part.n_bytes)
        if not any(ledger.documents.values()):
            raise InputError(f"{source.name} holds no documents with text ({len(dropped)} empty or null)")
        if note := ledger.fill_empty_split(tokenizer):
            print(note, flush=True)
        return writer.publish(
            vocab_size=tokenizer.vocab_size,
            mask_token_id=tokenizer.mask_token_id,
            tokenizer=tokenizer.name,
            eot_id=tokenizer.eot_id,
            special_ids=tokenizer.special_ids,
            train_bytes=ledger.n_bytes["train"],
            val_bytes=ledger.n_bytes["val"],
            train_documents=ledger.documents["train"],
            val_documents=ledger.documents["val"],
            dropped_documents=len(dropped),
            source=source.name,
            settings=settings,
        )


def _finished(out: Path, settings: dict) -> DatasetMeta | None:
    """The dataset that these settings made before, if it is in `out`. Raises InputError if something else is."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file, not a folder")
    if not (out / "train.bin").exists():
        return None
    meta = open_dataset(out).meta
    different = [name for name in settings if settings[name] != meta.settings.get(name)]
    if different:
        raise InputError(f"{out} holds a dataset made with another {', '.join(different)}: add --overwrite, or choose another --out")
    print(f"{out} is finished already, with the same settings: reused", flush=True)
    return meta


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def _parser() -> Parser:
    default = Recipe(source="")
    parser = Parser(prog="python -m data.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="pydocs, openwebtext, any Hugging Face dataset name, or local .txt, .jsonl[.gz|.zst], .parquet, folders, globs")
    add("--tokenizer", default=default.tokenizer, help=f"bytes, a tiktoken encoding, tokenizer.json or model name ({default.tokenizer})")
    add("--out", type=Path, required=True, help="the dataset folder to write")
    add(
        "--val-fraction",
        type=_fraction,
        help=f"documents held out ({VAL_FRACTION}; openwebtext {OPENWEBTEXT_VAL_FRACTION}). Both splits get at least one document, "
        "a single document is cut in two; 0 leaves val.bin empty (training then needs another --val-fraction), 1 leaves train.bin empty (a test set)",
    )
    add("--seed", type=int, default=default.seed, help=f"of the split ({default.seed})")
    add("--limit", type=_positive, help="read this many documents only")
    add("--text-column", default=default.options.text_column, help=f"text column of rows ({default.options.text_column})")
    add("--split", default=default.options.split, help=f"which split of a hub dataset to read ({default.options.split})")
    add("--subset", help="which configuration of a hub dataset to read")
    add("--errors", choices=("strict", "replace"), default=default.options.errors, help="invalid UTF-8: stop, or put U+FFFD there (strict)")
    add("--workers", type=_positive, help=f"processes that encode (one per CPU, at most {MOST_WORKERS})")
    add("--overwrite", action="store_true", help="replace a dataset that is in the folder already")
    return parser


def main(argv: list[str]) -> None:
    args = _parser().parse_args(argv)
    if not args.source or args.out == Path():
        raise InputError("SOURCE and --out must not be empty (an unset variable?)")
    if not 0 <= args.seed < 2**63:
        raise InputError(f"--seed {args.seed} must lie in 0..2^63 - 1")
    cpus = os.cpu_count() or 1
    workers = min(args.workers or MOST_WORKERS, cpus)
    fraction = args.val_fraction
    if fraction is None:
        fraction = OPENWEBTEXT_VAL_FRACTION if args.source == "openwebtext" else VAL_FRACTION
    options = SourceOptions(args.text_column, args.errors, args.limit, args.split, args.subset)
    meta = prepare(Recipe(args.source, args.tokenizer, fraction, args.seed, options), args.out, workers, args.overwrite)
    print(
        f"{args.out}: {meta.train_tokens:,} training tokens ({meta.train_documents:,} documents), "
        f"{meta.val_tokens:,} validation tokens ({meta.val_documents:,} documents), {meta.dropped_documents:,} empty documents dropped; "
        f"tokenizer {meta.tokenizer}, vocabulary {meta.vocab_size:,}, {meta.dtype}"
    )


if __name__ == "__main__":
    command(main)
