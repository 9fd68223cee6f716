"""Checkpoints that are whole or not there: written to a temporary folder, checked by digest, renamed into place.

    checkpoints/step_00001000/model.safetensors   parameters and buffers, clean names, a tied tensor once
                              optimizer.pt        AdamW's moments and the gradient scaler
                              state.json          step, best validation, layout of the batch, sha256 of the two files
    checkpoints/best                              the name of the best step's folder
"""

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from commands import InputError, RunFailed

FILES = ("model.safetensors", "optimizer.pt")
WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod)\.)+")  # what DDP and torch.compile put before a name, in any order


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep_last: int = 2):
        self.folder = Path(run_dir) / "checkpoints"
        self.keep_last = keep_last

    def save(self, model: nn.Module, optimizer: dict, state: dict) -> None:
        """Writes the checkpoint of `state["step"]`, then removes what `keep_last` no longer covers.

        Raises RunFailed, and leaves every earlier checkpoint as it was, if the files cannot be written.
        """
        final = self.folder / f"step_{state['step']:08d}"
        temporary = self.folder / f".{final.name}.writing"
        try:
            self._clear_unfinished()
            temporary.mkdir(parents=True)
            save_file(unshared_state(model), temporary / "model.safetensors")
            torch.save(optimizer, temporary / "optimizer.pt")
            digests = {name: sha256(temporary / name) for name in FILES}
            write_text(temporary / "state.json", json.dumps({**state, "sha256": digests}, indent=2) + "\n")
            for name in FILES:
                flush_to_disk(temporary / name)
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
            flush_to_disk(self.folder)
            if state["best_step"] == state["step"]:
                write_text(self.folder / "best", final.name + "\n")
        except (OSError, RuntimeError, SafetensorError) as error:  # torch's and safetensors' own writers hide the OSError
            shutil.rmtree(temporary, ignore_errors=True)
            kept = self.steps()
            last = f"the last good one is {self.folder / f'step_{kept[-1]:08d}'}" if kept else "there is none yet"
            raise RunFailed(f"cannot write the checkpoint of step {state['step']} to {self.folder}: {error}; {last}") from error
        self._prune(state["step"], state["best_step"])

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("step_*") if re.fullmatch("[0-9]+", path.name[5:]))

    def best(self) -> int | None:
        """The step with the lowest validation NLL, if one was saved."""
        if not (self.folder / "best").exists():
            return None
        name = (self.folder / "best").read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch("step_[0-9]+", name):
            raise InputError(f"{self.folder / 'best'} is damaged: it names no step")
        return int(name[5:])

    def newest_valid(self) -> tuple[Path, dict] | None:
        """(folder, state) of the newest checkpoint whose files are whole; says which it had to pass over. None: no checkpoint.

        Raises InputError if there are checkpoints and none of them is whole.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.open(step)
            except InputError as damaged:
                print(f"warning: {damaged}; trying the one before", file=sys.stderr, flush=True)
        if steps:
            raise InputError(f"{self.folder}: none of the {len(steps)} checkpoints is whole; start again with --overwrite")
        return None

    def open(self, step: int) -> tuple[Path, dict]:
        """(folder, state) of one step. Raises InputError if it is missing or damaged."""
        folder = self.folder / f"step_{step:08d}"
        if not folder.is_dir():
            have = ", ".join(map(str, self.steps())) or "none"
            raise InputError(f"{self.folder}: no checkpoint of step {step}; there are: {have}")
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            broken = [name for name in FILES if sha256(folder / name) != state["sha256"][name]]
            if state["step"] != step or "best_step" not in state:
                raise ValueError(f"state.json is not that of step {step}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"checkpoint {folder} is damaged ({type(error).__name__}: {error})") from error
        if broken:
            raise InputError(f"checkpoint {folder} is damaged: {', '.join(broken)} is not what was written")
        return folder, state

    def _prune(self, current: int, best_step: int | None) -> None:
        """Beyond `current` lie only checkpoints that were passed over as damaged: their steps are being made again."""
        steps = self.steps()
        kept = {*[step for step in steps if step <= current][-self.keep_last :], best_step}
        for step in set(steps) - kept:
            shutil.rmtree(self.folder / f"step_{step:08d}")

    def _clear_unfinished(self) -> None:
        for leftover in self.folder.glob(".step_*.writing"):
            shutil.rmtree(leftover)


def load_model(model: nn.Module, path: Path) -> None:
    """Copies the tensors of a safetensors file into `model`, strictly: every name on both sides, every shape.

    Prefixes of DDP and torch.compile are taken off. Raises InputError naming what is missing, unknown, misshapen or not finite.
    """
    try:
        stored = {WRAPPERS.sub("", name): tensor for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    for names in shared_names(model):  # a tied tensor is stored once and needed under each of its names
        known = next((stored[name] for name in names if name in stored), None)
        stored |= {name: known for name in names if known is not None}
    wanted = model.state_dict()
    missing, unknown = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    misshapen = [name for name in wanted.keys() & stored.keys() if wanted[name].shape != stored[name].shape]
    broken = [name for name in wanted.keys() & stored.keys() if not stored[name].isfinite().all()]
    faults = {"lacks": missing, "holds unknown": unknown, "has another shape of": misshapen, "holds numbers that are not finite in": broken}
    for what, names in faults.items():
        if names:
            raise InputError(f"{path} {what}: {', '.join(sorted(names)[:4])}{' ...' if len(names) > 4 else ''}")
    model.load_state_dict(stored)


def unshared_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with clean names and every tied tensor once, under the first of its names."""
    again = {name for names in shared_names(model) for name in names[1:]}
    return {WRAPPERS.sub("", name): tensor.contiguous() for name, tensor in model.state_dict().items() if name not in again}


def shared_names(model: nn.Module) -> list[list[str]]:
    """Groups of state-dict names that are one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all. Raises RunFailed if it cannot."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.write_text(text, encoding="utf-8")
        flush_to_disk(temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunFailed(f"cannot write {path}: {error}") from error


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
