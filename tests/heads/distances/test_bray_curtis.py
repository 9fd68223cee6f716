import numpy as np
import torch
from scipy.spatial.distance import cdist

from tests.heads.distances.oracle import assert_distances, distances_of, head_with, problem


def test_it_is_the_formula():
    h, w = problem()
    a, b = h.double().numpy(), w.double().numpy()
    expected = np.abs(a[:, None] - b).sum(-1) / (np.abs(a).sum(-1)[:, None] + np.abs(b).sum(-1) + 1e-12)
    assert_distances(head_with(w, "bray_curtis"), h, expected)


def test_it_is_scipys_where_all_signs_are_equal():
    h, w = (part.abs() for part in problem())
    assert_distances(head_with(w, "bray_curtis"), h, cdist(h.double().numpy(), w.double().numpy(), "braycurtis"))


def test_normalized_is_half_of_manhattan_on_normalised_rows():
    h, w = (part.double() for part in problem())
    unit_h, unit_w = (part / part.abs().sum(1, keepdim=True) for part in (h, w))
    manhattan = distances_of(head_with(unit_w, "manhattan").double(), unit_h)
    torch.testing.assert_close(distances_of(head_with(w, "bray_curtis", normalized=True).double(), h), manhattan / 2)


def test_a_zero_row_has_a_finite_gradient_when_normalized():
    h, w = problem()
    h[2] = 0
    h.requires_grad_()
    head_with(w, "bray_curtis", normalized=True, exponent=9.0)(h, torch.arange(17)).backward()
    assert torch.isfinite(h.grad).all() and h.grad[2].abs().max() < 100


def test_a_pair_at_the_floor_has_no_gradient_through_its_denominator_either():
    _, w = problem()
    head = head_with(w, "bray_curtis", exponent=6.0)
    hidden = head.weight[:1].detach().clone().requires_grad_()
    head(hidden, torch.tensor([0])).backward()
    assert torch.all(head.weight.grad[0] == 0), "this prototype is in no other pair"
    assert torch.any(head.weight.grad[1:] != 0)
