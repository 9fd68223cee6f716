import torch

from heads.distance_head import DistanceHead, Geometry
from heads.kernels.inner_product import SquaredDistance


def euclidean_norm(rows):
    return torch.linalg.vector_norm(rows, dim=-1)


EUCLIDEAN = Geometry(SquaredDistance(), euclidean_norm, root=0.5)


class Euclidean(DistanceHead):
    """||h - w||_2."""

    def build_geometry(self):
        return EUCLIDEAN

    def definition(self, h, w):
        return (h[:, None] - w).square().sum(-1).sqrt()
