"""From what a kernel gives, u, to logits: z = -s ln d (harmonic), z = -s d (Gibbs) or z = u (linear), with d = factor * u^root / ratio.

The sharpness s is the exponent n of the harmonic link, which may be learned, and 1 / tau of the Gibbs link: a 0-d tensor.
ratio (n, V) is the separable denominator row_i + column_k of the distances that have one (Bray-Curtis), else None.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Identity:
    """z = u."""

    singular = False  # whether dz/du is infinite at u = 0, so that floored pairs must have gradient 0

    def logits(self, u: Tensor, ratio: Tensor | None, sharpness: Tensor | None, out: Tensor | None = None) -> Tensor:
        """u (n, V), ratio (n, V) or None -> z (n, V): u itself, `out`, or a new tensor."""
        return u

    def pull(self, grad: Tensor, u: Tensor, ratio: Tensor | None, out: Tensor) -> Tensor | None:
        """grad dL/dz (n, V), overwritten -> dL/du in `out` (grad, u or another); returns dL/dratio or None. Both lack the factor `slope`."""
        out.copy_(grad)

    def slope(self, sharpness: Tensor | None):
        """The constant factor of dz/du that `pull` leaves out."""
        return 1.0


@dataclass(frozen=True)
class Harmonic:
    """z = -s ln d."""

    root: float = 1.0
    factor: float = 1.0
    singular = True

    def logits(self, u, ratio, sharpness, out=None):
        log = torch.log(u, out=out)  # the constant factor of d cancels in the softmax
        if ratio is not None:
            log.sub_(ratio.log(), alpha=1 / self.root)
        return log.mul_(sharpness * -self.root)

    def pull(self, grad, u, ratio, out):
        return _from_log(grad, u, ratio, self.root, out)

    def slope(self, sharpness):
        return sharpness * -self.root


@dataclass(frozen=True)
class Gibbs:
    """z = -s d."""

    root: float = 1.0
    factor: float = 1.0

    @property
    def singular(self):
        return self.root != 1

    def logits(self, u, ratio, sharpness, out=None):
        return distance(self, u, ratio, out).mul_(-sharpness)

    def pull(self, grad, u, ratio, out):
        if self.root == 1 and ratio is None:
            torch.mul(grad, self.factor, out=out)
            return None
        return _from_log(grad.mul_(distance(self, u, ratio)), u, ratio, self.root, out)

    def slope(self, sharpness):
        return sharpness * -self.root


def distance(link: Harmonic | Gibbs, u: Tensor, ratio: Tensor | None, out: Tensor | None = None) -> Tensor:
    """d = factor * u^root / ratio (n, V), in `out` or a new tensor."""
    d = torch.sqrt(u, out=out) if link.root == 0.5 else torch.pow(u, link.root, out=out)
    if ratio is not None:
        d.div_(ratio)
    return d.mul_(link.factor) if link.factor != 1 else d


def log_distance(link: Harmonic | Gibbs, u: Tensor, ratio: Tensor | None) -> Tensor:
    """ln d, a new tensor (n, V)."""
    log = torch.log(u).mul_(link.root)
    if ratio is not None:
        log.sub_(ratio.log())
    return log.add_(math.log(link.factor)) if link.factor != 1 else log


def _from_log(grad, u, ratio, root, out):
    """From dL/d ln d to dL/du in `out` and dL/dratio, both divided by root."""
    grad_ratio = None if ratio is None else (grad / ratio).mul_(-1 / root)
    torch.div(grad, u, out=out)
    return grad_ratio
