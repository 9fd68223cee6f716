import torch

from heads.distance_head import DistanceHead, Geometry
from heads.kernels.inner_product import CosineDistance


class Cosine(DistanceHead):
    """1 - h . w / (||h|| ||w||), half the squared chord between the normalised rows; the chord is what is floored."""

    defaults = DistanceHead.defaults | {"tau": 0.1}  # d lies in 0..2: at tau = 1 no probability could exceed e^2 / V

    def build_geometry(self):
        return Geometry(CosineDistance(), half_chord_norm, floor_power=2)

    def definition(self, h, w):
        return 1 - torch.nn.functional.normalize(h, dim=-1) @ torch.nn.functional.normalize(w, dim=-1).t()


def half_chord_norm(rows):
    """Norm of normalised rows for a floor on d = chord^2 / 2."""
    return rows.new_full(rows.shape[:-1], 0.5**0.5)
