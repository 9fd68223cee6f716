"""Evaluates a run on held-out text: likelihood, accuracy, effective rank, PCA, prototypes.

    python -m eval.evaluate out/quickstart
    python -m eval.evaluate out/quickstart --checkpoint best --tokens 100000
    python -m eval.evaluate out/mine --neighbours " Paris" " king"

Prints a table, writes RUN/eval.json (and eval_hidden.npz, for eval.compare's pictures), and ends with one JSON object on one line.
Computes in float32, so that figures of differently trained runs compare; the batch size changes no result.
"""

import io
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from commands import InputError, Parser, command
from data.loader import BatchShape, validation_batches
from data.token_file import Dataset, DatasetMeta, TokenFile, open_dataset
from data.tokenizers import load_tokenizer
from eval.geometry import PrototypeGeometry, has_distances, nearest_words
from eval.run_folder import HIDDEN_STATES
from eval.validation import Scores, mean_nll, metrics, score
from model.hf import NO_DATASET
from runs import Run, masking, open_run
from training.checkpoint import write_text
from training.distributed import choose_device
from training.record import strict_json

KEPT_STATES = 1024  # hidden states in the PCA picture
IDS_AT_ONCE = 1 << 20  # decoded at a time when the scored text's bytes are counted
LINE_SECONDS = 10
LABELS = {
    "val_nll": "NLL (nats/token)", "val_perplexity": "perplexity", "bits_per_byte": "bits per byte", "val_accuracy": "accuracy",
    "train_nll": "train NLL (nats/token)", "effective_rank": "effective rank", "pca5": "PCA5", "pca90": "PCA@90", "pc2_ev": "PC2 EV",
    "n_positions": "scored positions", "n_tokens": "tokens",
}  # fmt: skip
PSEUDO = {
    "val_nll": "NLL (nats/masked position)",
    "val_perplexity": "pseudo-perplexity (masked positions)",
    "bits_per_byte": "pseudo bits per byte", "train_nll": "train NLL (nats/masked position)",
}


def main(argv: list[str]) -> None:
    parser = Parser(prog="python -m eval.evaluate", description=__doc__.partition("\n")[0])
    parser.add_argument("run", metavar="RUN", help="run folder, such as out/quickstart")
    parser.add_argument("--checkpoint", default="last", help="last (default), best, or a step")
    parser.add_argument("--dataset", help="another dataset folder with the same vocabulary (default: the run's)")
    parser.add_argument("--tokens", type=int, help="score only the first N tokens of val (default: all)")
    parser.add_argument("--batch-size", type=int, help="windows at a time; changes no result (default: the run's)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or mps")
    parser.add_argument(
        "--neighbours", nargs="+", default=[], metavar="WORD", help='also list the nearest words of each WORD, as in " Paris"'
    )
    asked = parser.parse_args(argv)
    for flag, value in (("--tokens", asked.tokens), ("--batch-size", asked.batch_size)):
        if value is not None and value < 1:
            raise InputError(f"{flag} must be at least 1, not {value}")

    device = choose_device(asked.device)
    run = open_run(asked.run, asked.checkpoint, device)
    if asked.dataset is None and run.config.data.dataset == NO_DATASET:
        raise InputError(f"{asked.run} was imported and names no dataset: say which with --dataset DIR")
    dataset = open_dataset(asked.dataset or run.config.data.dataset)
    check_vocabulary(run.meta, dataset)
    tokenizer = load_tokenizer(run.meta.tokenizer) if asked.neighbours else None

    scores, results = evaluate(run, dataset, asked.tokens, asked.batch_size)
    if asked.neighbours:
        results["neighbours"] = neighbours(run, tokenizer, asked.neighbours)
    save_hidden_states(scores, run.directory / HIDDEN_STATES)
    write_text(run.directory / "eval.json", strict_json(results, indent=2) + "\n")
    print(table(run, results))
    if dataset.meta.checksum != run.meta.checksum:
        print("note: this is not the dataset that the run was trained on (the checksums differ)")
    if asked.neighbours:
        print(neighbour_table(run, results["neighbours"]))
    print(strict_json(results))


def evaluate(run: Run, dataset: Dataset, tokens: int | None = None, batch_size: int | None = None) -> tuple[Scores, dict]:
    """Scores `dataset`'s val (its first `tokens` tokens) with the run's model. Returns the sums and eval.json's figures."""
    config, model = run.config, run.model
    device = model.head.weight.device
    shape = BatchShape(config.model.block_size, batch_size or config.eval.batch_size or config.train.batch_size)
    rule = masking(config, run.meta, model)

    def windows(file: TokenFile, limit: int | None, what: str) -> Iterator:
        total = math.ceil(min(len(file), limit or len(file)) / (shape.block_size * shape.batch_size))
        return progress(validation_batches(file, shape, limit, rule, device), total, what)

    scores = score(model, windows(dataset.val, tokens, "val"), keep_states=KEPT_STATES)
    figures = metrics(scores)
    n_bytes = text_bytes(dataset, 0 if rule else 1, scores.n_tokens)
    bits = figures["val_nll"] / math.log(2) * scores.n_tokens / n_bytes if n_bytes else None
    results = {
        "step": run.step,
        "train_nll": mean_nll(model, windows(dataset.train, config.eval.tokens, "train")),
        **figures,
        "bits_per_byte": bits,
        "exponent": model.head.exponent_value,
        "objective": "causal" if model.backbone.causal else "masked",
        "prototypes": PrototypeGeometry().measure(model.head),
        "family": config.model.name,
        "head": config.head.name,
        "seed": config.seed,
        "dataset": str(dataset.folder),
        "checksum": dataset.meta.checksum,
    }
    return scores, results


def check_vocabulary(trained_on: DatasetMeta, dataset: Dataset) -> None:
    """Raises InputError unless ids mean the same words in the run and in `dataset`."""
    meta = dataset.meta
    named = trained_on.tokenizer and meta.tokenizer
    if trained_on.vocab_size != meta.vocab_size or (named and trained_on.tokenizer != meta.tokenizer):
        raise InputError(
            f"{dataset.folder} has the vocabulary of {meta.tokenizer} ({meta.vocab_size} ids) and the run that of {trained_on.tokenizer} "
            f"({trained_on.vocab_size} ids): prepare the text again with --tokenizer {trained_on.tokenizer}"
        )


def text_bytes(dataset: Dataset, first: int, count: int) -> int | None:
    """UTF-8 bytes of val's tokens first..first + count, end-of-text ids aside; from val's average where the tokenizer is out of reach."""
    meta = dataset.meta
    try:
        tokenizer = load_tokenizer(meta.tokenizer) if meta.tokenizer else None
    except InputError:
        tokenizer = None
    if tokenizer is None:
        return round(meta.val_bytes * count / meta.val_tokens) if meta.val_bytes else None
    total = 0
    for start in range(first, first + count, IDS_AT_ONCE):
        ids = dataset.val[start : min(start + IDS_AT_ONCE, first + count)]
        total += len(tokenizer.decode_bytes(ids[ids != meta.eot_id].tolist()))
    return total


def neighbours(run: Run, tokenizer, words: list[str]) -> dict[str, list]:
    """For each token of each word: the nearest words as [text, distance] (a linear head: inner product), nearest first."""
    found = {}
    for word in words:
        ids = tokenizer.encode(word)
        if not ids:
            raise InputError("--neighbours: an empty word has no neighbours")
        for token in ids:
            nearest = nearest_words(run.model.head, token)
            found[tokenizer.decode([token])] = [[tokenizer.decode([other]), distance] for other, distance in nearest]
    return found


def table(run: Run, results: dict) -> str:
    labels = LABELS if run.model.backbone.causal else LABELS | PSEUDO
    rows = [(label, "-" if results[key] is None else shown(results[key])) for key, label in labels.items()]
    few = f"rests on {results['n_pca']:,} vectors, fewer than 10 per dimension: few" if results["pca_few"] else f"{results['n_pca']:,}"
    rows.append(("vectors of the PCA", few))
    width = max(len(label) for label, _ in rows)
    title = f"{run.directory}, step {run.step}: {run.config.model.name} with the {run.config.head.name} head on {results['dataset']}"
    return "\n".join([title, *(f"  {label:<{width}}  {value}" for label, value in rows)])


def neighbour_table(run: Run, found: dict[str, list]) -> str:
    lines = [f"nearest words, by {'distance' if has_distances(run.model.head) else 'inner product'}:"]
    for word, nearest in found.items():
        lines.append(f"  {word!r}: " + ", ".join(f"{text!r} {distance:.4g}" for text, distance in nearest))
    return "\n".join(lines)


def shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if abs(value) < 100 else f"{value:,.2f}"


def save_hidden_states(scores: Scores, path: Path) -> None:
    """Stores both spectra, (D,) each, and the kept states' first two principal coordinates, (n, 2), about their mean."""
    summary = scores.summary.eigenvalues()
    every = scores.every.eigenvalues()
    stored = {"eigenvalues": summary, "eigenvalues_every_position": every}
    if summary is not None:
        centred = scores.states.double().numpy() - scores.summary.mean.cpu().numpy()
        stored["projection"] = centred @ scores.summary.components(2).T
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{key: value for key, value in stored.items() if value is not None})
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(buffer.getvalue())
    os.replace(temporary, path)


def progress(batches: Iterable, total: int, what: str) -> Iterator:
    """`batches`, with a bar on a terminal and otherwise a plain line every ten seconds."""
    if sys.stdout.isatty():
        from tqdm import tqdm

        yield from tqdm(batches, total=total, desc=what, unit="batch", leave=False)
        return
    printed = time.monotonic()
    for done, batch in enumerate(batches):
        if time.monotonic() - printed >= LINE_SECONDS:
            printed = time.monotonic()
            print(f"{what}: {done} of {total} batches", flush=True)
        yield batch


if __name__ == "__main__":
    command(main)
