"""The record of a run: its folder, what it ran on, one JSON line per step and evaluation, one line for the reader."""

import contextlib
import datetime
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
from tqdm import tqdm

from commands import InputError, RunFailed
from training.checkpoint import write_text

RUN_FILES = (  # what a run and its evaluation leave in its folder
    "metrics.jsonl", "emissions*.csv*", ".emissions*.json", "checkpoints", "eval.json", "eval_hidden.npz", "tensorboard", "wandb",
    ".*.writing", "run.json", "config.toml",
)  # fmt: skip
PACKAGES = ("numpy", "scipy", "tiktoken", "datasets", "codecarbon", "safetensors")
COLUMNS = {  # of the terminal's line, in this order: key -> format
    "loss": "loss {:.4f}", "lr": "lr {:.2e}", "grad_norm": "grad_norm {:.3f}", "step_ms": "{:.0f} ms", "tokens_per_s": "{:,.0f} tokens/s", "mfu": "mfu {:.3f}",
    "memory_mb": "{:,.0f} MB", "train_nll": "train_nll {:.4f}", "val_nll": "val_nll {:.4f}", "val_perplexity": "perplexity {:.3f}",
    "val_accuracy": "accuracy {:.4f}", "effective_rank": "effective_rank {:.1f}", "pca5": "pca5 {:.3f}",
}  # fmt: skip


class Record:
    """The run folder, as the main process writes it; on every other process (`active` False) all of it does nothing."""

    def __init__(self, run_dir: Path, active: bool, log_interval: int):
        self.run_dir = Path(run_dir)
        self.active = active
        self.log_interval = log_interval
        self.metrics = None
        self.bar = None
        self.about: dict = {}

    def begin(self, config_toml: str, about: dict, progress: tuple[int, int], resumed: bool = False) -> None:
        """Opens the folder for a run at `progress` (step, max_steps): writes config.toml and run.json.

        A resumed run takes from metrics.jsonl what lies beyond `step`: updates that are about to be made again (their
        emissions stay, they were emitted). Any other run empties the folder first.
        """
        if not self.active:
            return
        if not resumed and (self.run_dir / "config.toml").exists():
            clear_run(self.run_dir)
        step, max_steps = progress
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_text(self.run_dir / "config.toml", config_toml)
        self.about = {**describe_machine(), **about, "started": now(), "ended": None, "exit_reason": None}
        if (self.run_dir / "run.json").exists():  # a resumed run: its earlier sessions stay listed
            earlier = read_json(self.run_dir / "run.json")
            session = {key: earlier.get(key) for key in ("started", "ended", "exit_reason", "world_size", "git")}
            self.about["earlier_sessions"] = [*earlier.get("earlier_sessions", []), session]
        self.describe()
        rewind_metrics(self.run_dir / "metrics.jsonl", step or -1)  # at step 0 the first evaluation is made again too
        self.metrics = open(self.run_dir / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # a line reaches the file at its end
        self.bar = tqdm(total=max_steps, initial=step, unit="step", disable=None, dynamic_ncols=True)  # None: off where stderr is no terminal

    @property
    def session(self) -> int:
        """How often the run was begun or resumed, this time included; known to the main process."""
        return 1 + len(self.about.get("earlier_sessions", []))

    def describe(self, **facts) -> None:
        """Adds facts to run.json."""
        if self.active:
            self.about |= facts
            write_text(self.run_dir / "run.json", strict_json(self.about, indent=2) + "\n")

    def train(self, line: dict) -> None:
        if self.active:
            self._write({"kind": "train", **line})
            self.bar.update(1)
            if self.log_interval and line["step"] % self.log_interval == 0:
                self._say(line)

    def evaluation(self, line: dict) -> None:
        if self.active:
            self._write({"kind": "eval", **line})
            self._say(line)

    def emissions(self, line: dict) -> None:
        if self.active:
            self._write({"kind": "emissions", **line})

    def say(self, message: str) -> None:
        if self.active:
            with contextlib.suppress(OSError):  # a terminal that is gone, or full, is no reason to stop training
                tqdm.write(message, file=sys.stdout)
                sys.stdout.flush()

    def flush(self) -> None:
        """Sees the lines on the disk, so that a checkpoint never knows more than the record."""
        if self.metrics is not None:
            os.fsync(self.metrics.fileno())

    def end(self, reason: str) -> None:
        if self.metrics is not None:
            self.bar.close()
            self.metrics.close()
            self.describe(ended=now(), exit_reason=reason)
            self.metrics = None

    def _write(self, line: dict) -> None:
        try:
            self.metrics.write(strict_json(line) + "\n")
        except OSError as error:
            raise RunFailed(f"cannot write {self.run_dir / 'metrics.jsonl'}: {error}; make room and go on with --resume") from error

    def _say(self, line: dict) -> None:
        shown = [text.format(line[key]) for key, text in COLUMNS.items() if line.get(key) is not None]
        if self.about.get("objective") == "masked":
            shown = [text.replace("perplexity", "pseudo-perplexity") for text in shown]
        self.say(f"step {line['step']:>6} | " + " | ".join(shown))


def rewind_metrics(path: Path, step: int) -> None:
    """Drops train and eval lines beyond `step`, and a last line that a crash cut short. Whole or not at all."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            if line["kind"] == "emissions" or line["step"] <= step:
                kept.append(text + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # cut by the crash: its step is beyond the checkpoint, or is lost
    write_text(path, "".join(kept))


def read_json(path: Path) -> dict:
    """The JSON object in a file of a run folder. Raises InputError naming the file if it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return value
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); restore it, or start again with --overwrite") from error


def check_folder(run_dir: Path, resume: bool, overwrite: bool) -> None:
    """Raises InputError if the run may not use the folder; changes nothing."""
    used = run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir()))
    if resume and not run_dir.is_dir():
        raise InputError(f"--resume: there is no run folder {run_dir}; start the run without --resume")
    if used and not resume and not overwrite:
        raise InputError(f"{run_dir} is not empty: go on with --resume, start again with --overwrite, or choose another --out_dir")
    names = {path.name for path in run_dir.iterdir()} if used and run_dir.is_dir() else set()
    if used and not {"config.toml", "run.json"} <= names and names != {"config.toml"}:  # the last: killed while it began
        raise InputError(f"{run_dir} is not empty and no run folder (config.toml and run.json): choose another --out_dir, or remove it yourself")


def clear_run(run_dir: Path) -> None:
    """Takes away what a run writes, for one that starts again at step 0; other files stay, and config.toml and run.json go last,
    so that what is left is a run folder until the end."""
    written = [path for pattern in RUN_FILES for path in run_dir.glob(pattern)]
    for path in written:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def describe_machine() -> dict:
    """What the run stands on: git revision, versions, hardware."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    hardware = {"machine": platform.platform(), "cpu": cpu_name(), "cpu_count": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}
    return {"git": git_state(), "versions": {"python": platform.python_version(), **installed, "torch": torch.__version__}, "hardware": hardware}


def git_state() -> dict | None:
    """Revision and dirty flag of the code that runs; None outside a git checkout."""
    here = Path(__file__).parent
    try:
        revision, status = (
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"revision": revision, "dirty": bool(status)}


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def peak_memory_mb(device: torch.device) -> float | None:
    """Highest memory so far, in MB of 10^6 bytes: allocated on the GPU, or resident in this process;
    None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def strict_json(value: object, indent: int | None = None) -> str:
    """JSON that every parser reads: non-finite numbers are the strings "inf", "-inf", "nan"."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
