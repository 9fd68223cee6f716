import math
from functools import partial

import torch

from heads.distance_head import DistanceHead, Geometry
from heads.distances.chebyshev import CHEBYSHEV
from heads.distances.euclidean import EUCLIDEAN, Euclidean
from heads.distances.manhattan import MANHATTAN, Manhattan
from heads.kernels.tiles import PowerNorm, PowerSum

LARGEST_SUM_P = 6  # p-th powers of the differences of one batch spread too far for a float32 sum beyond it
LARGEST_P = 1e30


class Minkowski(DistanceHead):
    """||h - w||_p, p >= 1: exactly Manhattan, Euclidean and Chebyshev at p = 1, 2 and inf."""

    defaults = DistanceHead.defaults | {"p": 3.0}
    same = {1: MANHATTAN, 2: EUCLIDEAN, math.inf: CHEBYSHEV}

    def build_geometry(self):
        p = self.settings["p"]
        if not isinstance(p, int | float) or isinstance(p, bool) or not (1 <= p <= LARGEST_P or p == math.inf):
            raise ValueError(f"p {p!r}: must be a number, at least 1 and at most {LARGEST_P:g} (or inf, the Chebyshev distance)")
        if p in self.same:
            return self.same[p]
        p = float(p)
        if p > LARGEST_SUM_P:
            return Geometry(PowerNorm(p), partial(power_norm, p))
        return Geometry(PowerSum(p), partial(power_norm, p), root=1 / p)

    @property
    def init_std(self):
        return (Euclidean if self.settings["p"] == 2 else Manhattan).init_std

    def definition(self, h, w):
        return torch.linalg.vector_norm(h[:, None] - w, ord=self.settings["p"], dim=-1)


def power_norm(p, rows):
    """(n, D) -> (n,), by the ratios to the largest entry, whose powers fit."""
    largest = rows.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    return largest[:, 0] * torch.linalg.vector_norm(rows / largest, ord=p, dim=-1)
