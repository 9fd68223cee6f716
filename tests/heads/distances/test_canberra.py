import numpy as np
import torch
from scipy.spatial.distance import cdist

from tests.heads.distances.oracle import assert_distances, distances_of, head_with, problem


def test_it_is_the_formula_and_scipys_up_to_eps():
    h, w = problem()
    a, b = h.double().numpy(), w.double().numpy()
    assert_distances(head_with(w, "canberra"), h, (np.abs(a[:, None] - b) / (np.abs(a[:, None]) + np.abs(b) + 1e-12)).sum(-1))
    torch.testing.assert_close(distances_of(head_with(w, "canberra"), h), torch.from_numpy(cdist(a, b, "canberra")), rtol=1e-5, atol=0)


def test_min_denominator():
    h, w = problem()
    a, b = h.double().numpy(), w.double().numpy()
    expected = (np.abs(a[:, None] - b) / np.maximum(np.abs(a[:, None]) + np.abs(b) + 1e-12, 1.5)).sum(-1)
    assert_distances(head_with(w, "canberra", min_denominator=1.5), h, expected)


def test_weighted_by_its_own_denominators_it_is_bray_curtis():
    h, w = (part.double() for part in problem())
    s = h[:, None].abs() + w.abs()
    weighted = ((h[:, None] - w).abs() / s * (s / s.sum(-1, keepdim=True))).sum(-1)
    torch.testing.assert_close(distances_of(head_with(w, "bray_curtis").double(), h), weighted)
