"""A run folder read for comparison: its config, its record, its curves, its evaluation. Needs neither weights nor dataset."""

import json
import math
import tomllib
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from commands import InputError
from eval.metrics_file import Metrics, read_metrics, restore
from training.emissions import read_rows

HIDDEN_STATES = "eval_hidden.npz"  # written by eval.evaluate beside eval.json: what the pictures of hidden states need


@dataclass
class RunFolder:
    """One run. `config` is the resolved TOML as nested dicts, `about` is run.json, `evaluation` is eval.json; both may be empty."""

    directory: Path
    config: dict
    about: dict
    evaluation: dict
    metrics: Metrics
    emissions: list[dict]  # rows per interval and scope, of all nodes and sessions

    @property
    def family(self) -> str:
        return self.config["model"]["name"]

    @property
    def head(self) -> str:
        return self.config["head"]["name"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @cached_property
    def options(self) -> tuple[tuple[str, object], ...]:
        """What makes this head differ from another of its name: its options and untied prototypes; sorted."""
        options = {key: value for key, value in self.config["head"].items() if key != "name"}
        if not self.config["model"].get("tie_weights", True):
            options["untied"] = True
        return tuple(sorted(options.items()))

    @property
    def learning_rate(self) -> float:
        return self.config["optimizer"]["learning_rate"]

    @property
    def masked(self) -> bool:
        """Whether the run predicts masked positions: its perplexity is a pseudo-perplexity, no language model's."""
        return self.about.get("objective", self.evaluation.get("objective", "masked" if self.family == "bert" else "causal")) == "masked"

    @property
    def max_steps(self) -> int:
        return self.config["train"]["max_steps"]

    @cached_property
    def final(self) -> dict:
        """The evaluation after the last update; empty if the run has not got there."""
        last = self.metrics.eval[-1] if self.metrics.eval else {}
        return last if last.get("step") == self.max_steps else {}

    @property
    def evaluated_whole(self) -> bool:
        """Whether eval.json scores the finished run on all of its own val: what may stand beside other runs' figures."""
        dataset, scored = self.about.get("dataset") or {}, self.evaluation.get("n_tokens")
        same_text = self.evaluation.get("checksum") in (None, dataset.get("checksum"))
        all_of_it = None in (scored, dataset.get("val_tokens")) or dataset["val_tokens"] - scored <= 1  # the first token is no target
        return bool(self.final) and self.evaluation.get("step") == self.max_steps and same_text and all_of_it

    def results(self, whole: bool) -> dict:
        """Figures of the finished model: on all of val by `eval.evaluate`, or on what training itself evaluates. Empty if there are none."""
        return (self.evaluation if self.evaluated_whole else {}) if whole else self.final

    @property
    def norms(self) -> dict[int, float]:
        """Step -> norm of the full gradient before clipping."""
        return {line["step"]: line["grad_norm"] for line in self.metrics.train if isinstance(line.get("grad_norm"), (int, float))}

    def hidden_states(self) -> dict[str, np.ndarray] | None:
        """Eigenvalues (D,) of the covariance and principal coordinates (n, 2) of hidden states, if `eval.evaluate` has scored all of val."""
        path = self.directory / HIDDEN_STATES
        if self.evaluation and not self.evaluated_whole:
            return None
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as stored:
                return dict(stored)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):  # damaged: as if `eval.evaluate` had not been run
            return None

    def energy_at(self, key: str, steps: list[int]) -> np.ndarray:
        """Cumulative `key` ("kwh", "gco2eq") of training at each of `steps`, linear within an interval; NaN beyond what was measured.

        What lost steps of an interrupted run cost is part of it: it was spent on the way.
        """
        intervals: dict[tuple, float | None] = {}  # summed over nodes
        for row in self.spent_on("training"):
            interval = (row.get("session", 1), row["first_step"], row["last_step"])
            before = intervals.get(interval, 0.0)
            intervals[interval] = None if before is None or row.get(key) is None else before + row[key]
        if not intervals or None in intervals.values():
            return np.full(len(steps), math.nan)
        curve: list[tuple[float, float]] = []  # (step, cumulative)
        total = 0.0
        for (_, first_step, last_step), amount in intervals.items():
            before = first_step - 1
            if curve and before < curve[-1][0]:  # a crash led back to `before`: all that was spent until then counts from there on
                until = np.interp(before, *zip(*curve, strict=True))
                curve = [point for point in curve if point[0] < before] + [(np.nextafter(before, -np.inf), until)]
            curve += [(before, total), (last_step, total + amount)]
            total += amount
        return np.interp(steps, *zip(*curve, strict=True), left=math.nan, right=math.nan)

    def spent_on(self, scope: str) -> list[dict]:
        """The emissions rows of "training", "evaluation" or "checkpoint"."""
        return [row for row in self.emissions if row.get("scope") == scope]


def read_run(directory: Path | str) -> RunFolder:
    """Opens a run folder for reading. Raises InputError if it is none; missing metrics or evaluations are no error."""
    directory = Path(directory)
    path = directory / "config.toml"
    if not path.is_file():
        raise InputError(f"{directory}: not a run folder (no config.toml)")
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in ("seed", "model", "head", "optimizer", "schedule", "train", "data") if key not in config]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML: {error}") from error
    if missing:
        raise InputError(f"{path}: not a run's resolved config (no {', '.join(missing)})")
    about, evaluation = (read_json(directory / name) for name in ("run.json", "eval.json"))
    metrics = read_metrics(directory / "metrics.jsonl")
    # the metrics file holds the main node's rows only; the tables of all nodes come first, where they are
    return RunFolder(directory, config, about, evaluation, metrics, read_rows(directory) or metrics.emissions)


def read_json(path: Path) -> dict:
    """A JSON object with its non-finite numbers restored; a missing or broken file reads as empty."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    return restore(value) if isinstance(value, dict) else {}
