from scipy.spatial.distance import cdist

from tests.heads.distances.oracle import assert_distances, head_with, problem


def test_it_is_scipys():
    h, w = problem()
    assert_distances(head_with(w, "euclidean"), h, cdist(h.double().numpy(), w.double().numpy(), "euclidean"))
