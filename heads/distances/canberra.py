import torch

from heads.distance_head import DistanceHead, Geometry, check_positive
from heads.kernels.tiles import Canberra as CanberraKernel

EPS = 1e-12


class Canberra(DistanceHead):
    """sum_i |h_i - w_i| / (|h_i| + |w_i| + eps); with `min_denominator`, the robust variant, no denominator is smaller than that."""

    defaults = DistanceHead.defaults | {"min_denominator": 0.0}
    init_std = 1.0  # terms are far from 1 only where |w_i| is not small beside |h_i|

    def build_geometry(self):
        smallest = self.settings["min_denominator"]
        if isinstance(smallest, bool) or smallest != 0:
            check_positive("min_denominator", smallest)
        return Geometry(CanberraKernel(EPS, float(smallest)), self.norm)

    def norm(self, rows):
        """The distance from 0; blocks of rows bound what is held."""
        sizes = (part.abs() for part in rows.split(4096))
        return torch.cat([(size / (size + EPS).clamp(min=self.settings["min_denominator"])).sum(-1) for size in sizes])

    def definition(self, h, w):
        denominators = (h[:, None].abs() + w.abs() + EPS).clamp(min=self.settings["min_denominator"])
        return ((h[:, None] - w).abs() / denominators).sum(-1)
