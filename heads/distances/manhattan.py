import torch

from heads.distance_head import DistanceHead, Geometry
from heads.kernels.tiles import PowerSum


def manhattan_norm(rows):
    return torch.linalg.vector_norm(rows, ord=1, dim=-1)


MANHATTAN = Geometry(PowerSum(1), manhattan_norm)


class Manhattan(DistanceHead):
    """||h - w||_1."""

    init_std = 1.0  # on the scale of h: beside much smaller prototypes the gradient is only sign(h)

    def build_geometry(self):
        return MANHATTAN

    def definition(self, h, w):
        return (h[:, None] - w).abs().sum(-1)
