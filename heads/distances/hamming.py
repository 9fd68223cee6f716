from dataclasses import dataclass

import torch

from heads.distance_head import DistanceHead, Geometry, check_positive
from heads.distances.manhattan import manhattan_norm
from heads.kernels import Pairs
from heads.kernels.tiles import PowerSum
from heads.noise import logistic_noise


class Hamming(DistanceHead):
    """1/D sum_i 1[h_i != w_i] of binarised features, relaxed: mean_i |s(h_i) - s(w_i)|.

    relaxation "soft": s(x) = sigmoid(x / temperature); "hard": distances of the thresholded features 1[x > 0], with the soft
    distance's derivative (straight-through); "gumbel": as soft, with logistic noise added to both sides while training.
    """

    defaults = DistanceHead.defaults | {"relaxation": "soft", "temperature": 1.0}
    init_std = 1.0  # on the scale of h: sigmoids of small prototypes are all 1/2

    def build_geometry(self):
        relaxation = self.settings["relaxation"]
        if relaxation not in ("soft", "hard", "gumbel"):
            raise ValueError(f"relaxation {relaxation!r}: must be soft, hard or gumbel")
        check_positive("temperature", self.settings["temperature"])
        self.noisy = relaxation == "gumbel"
        kernel = ThresholdedManhattan(1) if relaxation == "hard" else PowerSum(1)
        return Geometry(kernel, manhattan_norm, factor=1 / self.n_embd)

    def map(self, rows, noise=None):
        if noise is not None:
            rows = rows + logistic_noise(rows, noise)
        nothing = 0 * rows.detach().sum()  # NaN if anything is not finite, which the sigmoid would hide
        return torch.sigmoid(torch.add(nothing, rows, alpha=1 / self.settings["temperature"]))

    def definition(self, h, w):
        soft = (self.map(h)[:, None] - self.map(w)).abs().mean(-1)
        if self.settings["relaxation"] != "hard":
            return soft
        return soft + ((h[:, None] > 0) != (w > 0)).to(h.dtype).mean(-1) - soft.detach()


@dataclass(frozen=True)
class ThresholdedManhattan(PowerSum):
    """Values of the rows thresholded at 1/2, gradients of the rows as they are."""

    def bind(self, y, parameter=None, dtype=None):
        return ThresholdedPairs(self, y)


class ThresholdedPairs(Pairs):
    def __init__(self, kernel, y):
        super().__init__(kernel, y)
        self.bits = threshold(y)  # (V, D)
        self.ones = self.bits.sum(1)  # (V,)

    def values(self, x):
        bits = threshold(x)
        return (bits @ self.bits.t()).mul_(-2).add_(self.ones).add_(bits.sum(1, keepdim=True))


def threshold(rows):
    """1[x > 1/2]; NaN stays NaN."""
    return (rows > 0.5).to(rows.dtype) + (rows - rows)
