"""Batches from token files. The global batch of step s is a function of (seed, s); ranks and micro-steps take slices of it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from commands import InputError
from data.masking import Masking
from data.randomness import generator
from data.token_file import TokenFile


class Batch(NamedTuple):
    """`tokens` (B, T). Causal: `targets` (B, T), `positions` None. Masked-LM: `targets` (N,) and their flat indices (N,) into B x T."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None


class BatchShape(NamedTuple):
    """`batch_size` counts the sequences of one process and one micro-step."""

    block_size: int
    batch_size: int
    accumulation_steps: int = 1
    rank: int = 0
    world_size: int = 1

    @property
    def global_batch_size(self) -> int:
        """Sequences per update, over all micro-steps and processes."""
        return self.batch_size * self.accumulation_steps * self.world_size


class TrainLoader:
    """Training batches at random starts (as in nanoGPT), the next step's prepared in a thread.

    Micro-step m of rank r takes rows [(m x world_size + r) x batch_size, ... + batch_size) of the global batch, so that any
    division of the same number of rows gives the same rows. Raises InputError if the file is shorter than block_size + 1.
    """

    def __init__(self, tokens: TokenFile, shape: BatchShape, seed: int, masking: Masking | None = None, device="cpu"):
        _require(tokens, shape.block_size + 1, shape.block_size)
        self.tokens, self.shape, self.seed, self.masking = tokens, shape, seed, masking
        self.device = _indexed(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-loader")
        self._pending = {}  # step -> future of its batches

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of this rank in step `step`, on the device. An error of the thread is raised here."""
        ready = self._pending.get(step) or self._thread.submit(self._read, step)
        following = self._pending.get(step + 1) or self._thread.submit(self._read, step + 1)
        self._pending = {step + 1: following}
        return [_to(batch, self.device) for batch in ready.result()]

    def close(self) -> None:
        """Ends the thread; waits for the read in progress."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> list[Batch]:
        shape = self.shape
        stop = len(self.tokens) - shape.block_size  # a row takes block_size + 1 tokens
        starts = generator(self.seed, "train windows", step).integers(0, stop, size=shape.global_batch_size)
        batches = []
        for micro_step in range(shape.accumulation_steps):
            first = (micro_step * shape.world_size + shape.rank) * shape.batch_size
            rows = np.arange(first, first + shape.batch_size)
            windows = self.tokens.rows(starts[rows], shape.block_size + 1)  # (B, T + 1)
            masked = self.masking and self.masking.train(windows[:, :-1], self.seed, step, rows)
            batches.append(_pinned(_batch(windows, masked), self.device))
        return batches


def validation_batches(
    tokens: TokenFile, shape: BatchShape, limit: int | None = None, masking: Masking | None = None, device="cpu"
) -> Iterator[Batch]:
    """Every target once, in windows of stride block_size; ranks take every world_size-th window.

    Causal windows score each next token, so a file of n tokens has n - 1 targets; masked-LM windows score what is masked,
    the same in every evaluation. `limit` bounds the targets (masked-LM: the tokens), from the start of the file. What does
    not fill a window is a batch of its own, shorter than block_size, on one rank.
    Raises InputError at once if the file holds no full window.
    """
    ahead = 0 if masking else 1  # tokens read beyond the window: the last next-token target
    _require(tokens, shape.block_size + ahead, shape.block_size)
    total = len(tokens) - ahead if limit is None else min(len(tokens) - ahead, limit)
    n_full, tail = divmod(total, shape.block_size)
    mine = np.arange(shape.rank, n_full, shape.world_size)
    groups = [(mine[at : at + shape.batch_size], shape.block_size) for at in range(0, len(mine), shape.batch_size)]
    if tail and n_full % shape.world_size == shape.rank:
        groups.append((np.array([n_full]), tail))
    device = _indexed(device)

    def read() -> Iterator[Batch]:
        for windows, length in groups:
            rows = tokens.rows(windows * shape.block_size, length + ahead)  # (B, T + ahead)
            masked = masking and masking.validation(rows, windows)
            yield _to(_pinned(_batch(rows, masked), device), device)

    return read()


def _require(tokens: TokenFile, needed: int, block_size: int) -> None:
    if len(tokens) < needed:
        raise InputError(
            f"{tokens.path} holds {len(tokens)} tokens, fewer than the {needed} that block_size = {block_size} needs: "
            "prepare more text (or another --val-fraction), or lower model.block_size"
        )


def _batch(windows: np.ndarray, masked: tuple | None) -> Batch:
    """windows (B, T + 1) of a causal batch, or the (inputs, targets, positions) of a masked one."""
    arrays = masked or (windows[:, :-1], windows[:, 1:])
    return Batch(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))


def _indexed(device) -> torch.device:
    """`cuda` as the device that is current here: the thread's own current device would be 0 on every rank."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _pinned(batch: Batch, device: torch.device) -> Batch:
    """Page-locked tensors, which a GPU can fetch while the program goes on; unchanged for other devices."""
    if device.type != "cuda":
        return batch
    torch.cuda.set_device(device)
    return Batch(*(None if tensor is None else tensor.pin_memory() for tensor in batch))


def _to(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in batch))
