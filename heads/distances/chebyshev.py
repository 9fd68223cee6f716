import math

import torch

from heads.distance_head import DistanceHead, Geometry, check_positive
from heads.kernels.tiles import Maximum, SmoothMaximum


def chebyshev_norm(rows):
    return torch.linalg.vector_norm(rows, ord=torch.inf, dim=-1)


CHEBYSHEV = Geometry(Maximum(), chebyshev_norm)


class Chebyshev(DistanceHead):
    """||h - w||_inf; with `smooth`: alpha, (ln sum_i exp(alpha |h_i - w_i|) - ln D) / alpha, which is 0 at h = w and not homogeneous."""

    defaults = DistanceHead.defaults | {"smooth": None}
    init_std = 1.0  # on the scale of h: beside much smaller prototypes the largest coordinate is nearly always the same

    def build_geometry(self):
        alpha = self.settings["smooth"]
        if alpha is None:
            return CHEBYSHEV
        check_positive("smooth", alpha)
        return Geometry(SmoothMaximum(float(alpha)), chebyshev_norm)

    def definition(self, h, w):
        difference, alpha = (h[:, None] - w).abs(), self.settings["smooth"]
        if alpha is None:
            return difference.amax(-1)
        return (torch.logsumexp(alpha * difference, -1) - math.log(h.shape[-1])) / alpha
