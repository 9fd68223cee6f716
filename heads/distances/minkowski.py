import math
from functools import partial

import torch

from heads.distance_head import DistanceHead, Geometry
from heads.distances.chebyshev import Chebyshev
from heads.distances.euclidean import Euclidean
from heads.distances.manhattan import Manhattan
from heads.floor import Floor
from heads.kernels import widest
from heads.kernels.tiles import PowerSum

LARGEST_FLOAT32_P = 6  # p-th powers of the differences of one batch spread too far for float32 beyond it


class Minkowski(DistanceHead):
    """||h - w||_p, p >= 1: exactly Manhattan, Euclidean and Chebyshev at p = 1, 2 and inf. Above p = 6 it works in float64."""

    defaults = DistanceHead.defaults | {"p": 3.0}
    same = {1: Manhattan, 2: Euclidean, math.inf: Chebyshev}

    def build_geometry(self):
        p = self.settings["p"]
        if not isinstance(p, int | float) or isinstance(p, bool) or not p >= 1:
            raise ValueError(f"p {p!r}: must be a number, at least 1 (inf is the Chebyshev distance)")
        if p in self.same:
            return Geometry(**vars(self.same[p](1, 1).geometry))
        p = float(p)
        return Geometry(PowerSum(p), Floor(partial(power_norm, p), power=p), root=1 / p, power=p)

    @property
    def init_std(self):
        return self.same.get(self.settings["p"], Manhattan).init_std

    def map(self, rows, noise=None):
        p = self.settings["p"]
        return rows.to(widest(rows.device)) if p > LARGEST_FLOAT32_P and p != math.inf else rows

    def definition(self, h, w):
        return torch.linalg.vector_norm(h[:, None] - w, ord=self.settings["p"], dim=-1)


def power_norm(p, rows):
    return torch.linalg.vector_norm(rows, ord=p, dim=-1)
