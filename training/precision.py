"""Reduced precision and compilation: what runs in which number format, and what happens where a compiler is missing."""

import warnings
from collections.abc import Callable

import torch
from torch import nn

from commands import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """The autocast context of a run and, for float16 on CUDA, its gradient scaler.

    Raises InputError where the device cannot train in `name`.
    """

    def __init__(self, name: str, device: torch.device):
        if name == "float16" and device.type != "cuda":
            raise InputError(f'train.precision = "float16" needs CUDA (its gradients are scaled there); on {device.type} use bfloat16 or float32')
        if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise InputError('train.precision = "bfloat16": this GPU has no bfloat16; use float16 or float32')
        self.dtype = DTYPES[name]
        self.device_type = device.type
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "float16")

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not torch.float32)


def compile_backbone(backbone: nn.Module, trial: Callable[[], None]) -> bool:
    """Compiles `backbone` in place (names of parameters stay) and calls `trial`, one forward and backward pass, at once:
    a missing compiler shows at the first call and not before. Then one warning, and the backbone runs as it is written.
    """
    backbone.compile()
    try:
        trial()
    except Exception as error:
        backbone._compiled_call_impl = None  # what Module.compile() sets: calls go to forward() again
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        warnings.warn(f"torch.compile does not work here ({reason}); training goes on without it", stacklevel=2)
        return False
    return True
