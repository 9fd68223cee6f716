import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.special import logsumexp

from tests.heads.distances.oracle import assert_distances, distances_of, head_with, problem


def test_it_is_scipys():
    h, w = problem()
    assert_distances(head_with(w, "chebyshev"), h, cdist(h.double().numpy(), w.double().numpy(), "chebyshev"))


@pytest.mark.parametrize("alpha", [0.1, 3.0, 200.0])
def test_smooth(alpha):
    h, w = problem()
    t = np.abs(h.double().numpy()[:, None] - w.double().numpy())
    assert_distances(head_with(w, "chebyshev", smooth=alpha), h, (logsumexp(alpha * t, axis=-1) - np.log(9)) / alpha, rtol=1e-4)


def test_smooth_is_zero_at_the_prototype():
    _, w = problem()
    assert distances_of(head_with(w, "chebyshev", smooth=3.0), w).diagonal().abs().max() < 1e-5
