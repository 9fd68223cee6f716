"""The processes of a run: one without torchrun, N with it; which device each holds, and sums over all of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from commands import InputError, RunFailed

# Of one process for the others: main alone writes checkpoints, which takes minutes for billions of parameters on a shared disk.
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process among all processes of the run."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all processes, in place, and returns it. Alone: returns it as it is."""
        if self.size > 1:
            if tensor.device.type == self.device.type:
                dist.all_reduce(tensor)
            else:  # NCCL reduces only what lies on its own device
                tensor.copy_(self.all_reduce(tensor.to(self.device)))
        return tensor

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def on_main(self, action: Callable[[], object]) -> object:
        """`action()` as the main process alone carries it out; its result on every process.

        Where it raises InputError, the main process raises it and the others leave with the same exit status, silently.
        """
        if self.size == 1:
            return action()
        box = [None, None]  # result, error
        if self.is_main:
            try:
                box[0] = action()
            except InputError as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0, device=self.device)
        if box[1] is not None:
            raise box[1] if self.is_main else SystemExit(2)
        return box[0]


@contextmanager
def connect(device_name: str) -> Iterator[World]:
    """Joins the processes that torchrun started (none: a world of one) and leaves them at the end.

    Backend: NCCL between CUDA devices, Gloo otherwise. Raises InputError where the device does not exist or a
    machine has fewer GPUs than processes.
    """
    rank, local_rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(0, 0, 1, device)
        return
    nccl = device.type == "cuda" and dist.is_nccl_available()
    dist.init_process_group("nccl" if nccl else "gloo", device_id=device if nccl else None, timeout=PATIENCE)
    try:
        yield World(rank, local_rank, size, device)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # Gloo raises plain RuntimeErrors
            raise RunFailed(f"process {rank} of {size} lost the others ({str(error).splitlines()[0][:160]}); go on with --resume") from error
        raise
    finally:
        dist.destroy_process_group()


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` takes CUDA, then Apple's MPS, then the CPU. A CUDA process takes the GPU of its local rank."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, here in available.items() if here)
    if name not in available:
        raise InputError(f"unknown device {name!r}: it is auto, {', '.join(available)}")
    if not available[name]:
        here = ", ".join(kind for kind, is_here in available.items() if is_here)
        raise InputError(f"train.device = \"{name}\": this machine (or this build of torch) has no {name} device; it has: {here}")
    if name != "cuda":
        return torch.device(name)
    processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if processes > devices:
        raise InputError(f"torchrun started {processes} processes on this machine, which shows {devices} GPU(s): use --nproc_per_node={devices}")
    return torch.device("cuda", local_rank)
