"""Reads metrics.jsonl as it is found: finished, still being written, cut in the middle of a line, or continued after a crash."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # how strict JSON spells them


@dataclass
class Metrics:
    """The lines of one run by kind, in order of step, each step once; numbers are floats or ints, absent ones None."""

    train: list[dict] = field(default_factory=list)
    eval: list[dict] = field(default_factory=list)
    emissions: list[dict] = field(default_factory=list)  # all of them: what was emitted for lost steps was emitted
    unreadable: int = 0  # lines that are no JSON object: cut by a crash
    repeated: int = 0  # train and eval lines that a resumed run wrote again

    def column(self, key: str, kind: str = "train") -> np.ndarray:
        """One key over the lines that hold it, as float64; NaN where it is null or absent."""
        values = (line.get(key) for line in getattr(self, kind))
        return np.array([value if isinstance(value, (int, float)) else math.nan for value in values], dtype=np.float64)


def read_metrics(path: Path | str) -> Metrics:
    """Reads a metrics file; a missing one reads as empty.

    A run that was resumed goes back in steps. From there on the later lines count: of two lines for one step the later wins,
    and lines for steps after the point of return are dropped, so that a curve never mixes two histories.
    """
    path = Path(path)
    metrics = Metrics()
    if not path.is_file():
        return metrics
    train, evaluations = {}, {}
    with open(path, encoding="utf-8", errors="replace") as lines:
        for text in lines:
            line = parse(text)
            if line is None:
                metrics.unreadable += bool(text.strip())
            elif line["kind"] == "emissions":
                metrics.emissions.append(line)
            elif line["kind"] == "train":
                metrics.repeated += drop_from(train, line["step"]) + drop_from(evaluations, line["step"])
                train[line["step"]] = line
            elif line["kind"] == "eval":  # belongs to the state after `step`: later steps are undone, the step itself is not
                metrics.repeated += drop_from(train, line["step"] + 1) + drop_from(evaluations, line["step"])
                evaluations[line["step"]] = line
    metrics.train, metrics.eval = list(train.values()), list(evaluations.values())
    return metrics


def parse(text: str) -> dict | None:
    """One line as a dict with non-finite numbers restored; None if it is not a whole line of a metrics file."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(line, dict) or line.get("kind") not in ("train", "eval", "emissions"):
        return None
    if line["kind"] != "emissions" and not isinstance(line.get("step"), int):
        return None
    return restore(line)


def restore(value: object) -> object:
    """Strict JSON's "nan", "inf" and "-inf" as the floats they stand for, at any depth."""
    if isinstance(value, dict):
        return {key: restore(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restore(item) for item in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def drop_from(lines: dict[int, dict], step: int) -> int:
    """Removes the lines of `step` and later; they are in order, so this looks only at the end. Returns how many."""
    dropped = 0
    while lines and next(reversed(lines)) >= step:
        lines.popitem()
        dropped += 1
    return dropped
