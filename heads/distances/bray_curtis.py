import torch

from heads.distance_head import DistanceHead
from heads.distances.manhattan import MANHATTAN, manhattan_norm

EPS = 1e-12


class BrayCurtis(DistanceHead):
    """sum_i |h_i - w_i| / (sum_i (|h_i| + |w_i|) + eps): Manhattan with a separable denominator; `normalized`: on x / sum |x|."""

    defaults = DistanceHead.defaults | {"normalized": False}
    init_std = 1.0  # as for the Manhattan head

    def build_geometry(self):
        if not isinstance(self.settings["normalized"], bool):
            raise ValueError(f"normalized {self.settings['normalized']!r}: must be true or false")
        return MANHATTAN

    def map(self, rows, noise=None):
        if not self.settings["normalized"]:
            return rows
        norm = manhattan_norm(rows)[:, None]
        return rows / torch.where(norm == 0, 1.0, norm)

    def denominators(self, x, y):
        return manhattan_norm(x) + EPS, manhattan_norm(y)

    def definition(self, h, w):
        h, w = self.map(h), self.map(w)
        return (h[:, None] - w).abs().sum(-1) / (h.abs().sum(-1)[:, None] + w.abs().sum(-1) + EPS)
