"""Pairwise kernels: u(x_i, y_k) of rows already mapped, and its gradient. The fused loss asks for them one chunk of rows at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kernel:
    """A pairwise function of rows; its options are plain numbers, so that a kernel is hashable."""

    power = 1.0  # u(c x, c y) = c^power u(x, y), c > 0; powers of the entries that are summed may leave float32's range
    is_product = False  # whether its work is matrix products
    scale_free = False  # u(c x, c y) = u(x, y), though powers are summed on the way

    def pairwise(self, x: Tensor, y: Tensor) -> Tensor:
        """x (n, D), y (m, D) -> u (n, m), float32 (float64 if x is float64)."""
        raise NotImplementedError

    def backward(self, x: Tensor, y: Tensor, u: Tensor, grad_u: Tensor, grad_x: Tensor, grad_y: Tensor) -> None:
        """Adds d(sum grad_u * u)/dx and /dy to grad_x (n, D) and grad_y (m, D), buffers of u's dtype, in place."""
        raise NotImplementedError

    def bind(self, y: Tensor, parameter: Tensor | None = None, dtype=None) -> "Pairs":
        """The kernel with its second argument fixed, for a loop over chunks of rows x.

        parameter: a tensor that the kernel depends on (a bias, a metric), where it has one; dtype: of its matrix products, if any.
        Raises ValueError for a parameter that the kernel does not have.
        """
        if parameter is not None:
            raise ValueError(f"the kernel {self} has no parameter: a head on it cannot have a metric (weights of coordinates belong in `map`)")
        return Pairs(self, y)


class Pairs:
    """A kernel bound to the prototypes y (V, D). Kernels that prepare or finish something once per loss, not per chunk, override it."""

    def __init__(self, kernel: Kernel, y: Tensor):
        self.kernel, self.y = kernel, y

    def values(self, x: Tensor) -> Tensor:
        """x (n, D) -> u (n, V), a buffer that the next call may reuse. `complete` has to see all of it, part by part."""
        return self.kernel.pairwise(x, self.y)

    def complete(self, u: Tensor, x: Tensor, first: int) -> None:
        """Makes of a part of what `values` gave, u (n, V) of rows x (n, D), the kernel's values, in place. first: index of its first row."""

    def backward(self, x: Tensor, u: Tensor, grad_u: Tensor, weights: Tensor, grads: tuple[Tensor, Tensor]) -> None:
        """As Kernel.backward for the chunk last given to `values`, with gradient weights (n, 1) * grad_u; grad_u may be overwritten."""
        self.kernel.backward(x, self.y, u, grad_u.mul_(weights), *grads)

    def gradient_buffer(self, y: Tensor, will_be_written: bool) -> Tensor:
        """A buffer for the gradient of y (rows, D), of which `backward` (called, if `will_be_written`) gets the first V rows."""
        return torch.zeros_like(y)

    def finish(self, grad_y: Tensor) -> Tensor | None:
        """Adds to grad_y what was put off until all chunks were seen; returns the gradient of the kernel's parameter."""
        return None


class Buffer:
    """Memory that chunk after chunk is written to: fresh memory costs as much as a pass over it."""

    def __init__(self, like: Tensor):
        self.flat = like.new_empty(0)

    def shaped(self, n: int, m: int) -> Tensor:
        """(n, m), of the dtype and device asked for, with whatever was left there."""
        if self.flat.numel() < n * m:
            self.flat = self.flat.new_empty(n * m)
        return self.flat[: n * m].view(n, m)


def widest(device: torch.device) -> torch.dtype:
    """The widest floating point dtype that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64
