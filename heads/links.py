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

    def logits(self, u: Tensor, ratio: Tensor | None, sharpness: Tensor | None) -> Tensor:
        """u (n, V), ratio (n, V) or None -> z (n, V), a new tensor or u itself."""
        return u

    def pull(self, grad: Tensor, u: Tensor, ratio: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """grad dL/dz (n, V), overwritten -> (dL/du, dL/dratio or None), both still to be multiplied by `slope`."""
        return grad, None

    def slope(self, sharpness: Tensor | None):
        """The constant factor of dz/du that `pull` leaves out."""
        return 1.0


@dataclass(frozen=True)
class Harmonic:
    """z = -s ln d."""

    root: float = 1.0
    factor: float = 1.0
    singular = True

    def logits(self, u, ratio, sharpness):
        log = torch.log(u)  # the constant factor of d cancels in the softmax
        if ratio is not None:
            log.sub_(ratio.log(), alpha=1 / self.root)
        return log.mul_(sharpness * -self.root)

    def pull(self, grad, u, ratio):
        return _from_log(grad, u, ratio, self.root)

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

    def logits(self, u, ratio, sharpness):
        return distance(self, u, ratio).mul_(-sharpness)

    def pull(self, grad, u, ratio):
        if self.root == 1 and ratio is None:
            return grad.mul_(self.factor) if self.factor != 1 else grad, None
        return _from_log(grad.mul_(distance(self, u, ratio)), u, ratio, self.root)

    def slope(self, sharpness):
        return sharpness * -self.root


def distance(link: Harmonic | Gibbs, u: Tensor, ratio: Tensor | None) -> Tensor:
    """d = factor * u^root / ratio, a new tensor (n, V)."""
    d = torch.sqrt(u) if link.root == 0.5 else u.pow(link.root)
    if ratio is not None:
        d.div_(ratio)
    return d.mul_(link.factor) if link.factor != 1 else d


def log_distance(link: Harmonic | Gibbs, u: Tensor, ratio: Tensor | None) -> Tensor:
    """ln d, a new tensor (n, V)."""
    log = torch.log(u).mul_(link.root)
    if ratio is not None:
        log.sub_(ratio.log())
    return log.add_(math.log(link.factor)) if link.factor != 1 else log


def _from_log(grad, u, ratio, root):
    """dL/d ln d, overwritten -> (dL/du, dL/dratio), both divided by root."""
    grad_ratio = None if ratio is None else (grad / ratio).mul_(-1 / root)
    return grad.div_(u), grad_ratio
