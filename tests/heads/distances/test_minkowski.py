import math

import pytest
import torch
from scipy.spatial.distance import cdist

from tests.heads.distances.oracle import assert_distances, head_with, problem
from tests.heads.harness import assert_gradients_close, batch, head_gradients


@pytest.mark.parametrize("p", [1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.5, 7.0, 20.0, 64.0])
def test_it_is_scipys(p):
    h, w = problem()
    assert_distances(head_with(w, "minkowski", p=p), h, cdist(h.double().numpy(), w.double().numpy(), "minkowski", p=p))


@pytest.mark.parametrize("p, other", [(1, "manhattan"), (2, "euclidean"), (math.inf, "chebyshev")])
def test_three_cases_are_exactly_other_heads(p, other):
    h, w = problem()
    targets = batch(17, 31, 9)[1]
    loss, grads = head_gradients(head_with(w, "minkowski", p=p, exponent=7.0), h, targets)
    same_loss, same = head_gradients(head_with(w, other, exponent=7.0), h, targets)
    assert loss == same_loss and all(torch.equal(grads[key], same[key]) for key in grads)


def test_far_beyond_the_range_of_float32_powers():
    h, w = problem()
    for p in (5.5, 12.0):
        for factor in (1e-6, 1e6):
            head = head_with(w * factor, "minkowski", p=p, exponent=7.0)
            expected = cdist((h * factor).double().numpy(), (w * factor).double().numpy(), "minkowski", p=p)
            torch.testing.assert_close(head.distances(h * factor).double(), torch.from_numpy(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("p", [1e4, 1e30])
def test_a_huge_p_is_the_chebyshev_distance(p):
    h, w = problem()
    targets = batch(17, 31, 9)[1]
    loss, grads = head_gradients(head_with(w, "minkowski", p=p, exponent=7.0), h, targets)
    limit, expected = head_gradients(head_with(w, "chebyshev", exponent=7.0), h, targets)
    torch.testing.assert_close(loss, limit, rtol=1e-3, atol=0)
    assert_gradients_close(grads, {key: grad.double() for key, grad in expected.items()}, 0.02)
