"""TensorBoard and Weights & Biases behind one object; without either, that object does nothing.

Neither package is a requirement of this project: each is imported only when the config asks for it.
"""

import importlib
import math
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from commands import InputError


class TensorBoard:
    """Event files under RUN/tensorboard."""

    def __init__(self, run_dir: Path, settings: dict):
        load("tensorboard", "tensorboard")
        self.writer = load("torch.utils.tensorboard", "tensorboard").SummaryWriter(log_dir=str(run_dir / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of that service; where nobody is logged in it is kept offline, under RUN/wandb, rather than asking at the keyboard."""

    def __init__(self, run_dir: Path, settings: dict):
        wandb = load("wandb", "wandb")
        decided = os.environ.get("WANDB_MODE") or wandb.setup().settings.api_key
        self.run = wandb.init(dir=str(run_dir), name=run_dir.name, config=settings, mode=None if decided else "offline")

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}  # key of [log] -> class


class Trackers:
    """The trackers of a run: none, one or both. One that fails is dropped with a warning; training goes on."""

    def __init__(self, trackers: list[Any], interval: int = 1):
        self.trackers = trackers
        self.interval = interval

    def log(self, values: dict[str, Any]) -> None:
        """values: "step" and whatever was measured. Training lines only go out every `interval` steps, lines of an evaluation always."""
        step = values["step"]
        if not self.trackers or (step % self.interval and "val_nll" not in values):
            return
        numbers = {name: value for name, value in values.items() if name != "step" and is_number(value)}
        for tracker in list(self.trackers):
            self.attempt(tracker, tracker.log, step, numbers)

    def close(self) -> None:
        for tracker in list(self.trackers):
            self.attempt(tracker, tracker.close)
        self.trackers = []

    def attempt(self, tracker: Any, action: Any, *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as error:  # a service that is down is no reason to lose a training run
            print(f"warning: {type(tracker).__name__} is switched off: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self.trackers.remove(tracker)


def check_trackers(log: Any) -> None:
    """Raises InputError, one line, if a package that the [log] section asks for is missing."""
    for package in TRACKERS:
        if getattr(log, package):
            load(package, package)


def build_trackers(log: Any, run_dir: Path, settings: dict) -> Trackers:
    """The trackers that the [log] section (`interval`, `tensorboard`, `wandb`) asks for; call it on one process only.

    settings: the config as nested dicts, kept beside the curves. Raises: InputError, one line, if a package is missing.
    """
    return Trackers([make(Path(run_dir), settings) for name, make in TRACKERS.items() if getattr(log, name)], log.interval)


def load(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"log.{package} = true needs the package {package}, which is not installed: pip install {package}") from error


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
