import torch
from scipy.spatial.distance import cdist

from tests.heads.distances.oracle import assert_distances, distances_of, head_with, problem
from tests.heads.harness import batch


def test_it_is_scipys():
    h, w = problem()
    assert_distances(head_with(w, "cosine"), h, cdist(h.double().numpy(), w.double().numpy(), "cosine"))


def test_it_is_half_the_squared_euclidean_distance_of_normalised_rows():
    h, w = (torch.nn.functional.normalize(part.double(), dim=1) for part in problem())
    euclidean = distances_of(head_with(w, "euclidean").double(), h)
    torch.testing.assert_close(distances_of(head_with(5 * w, "cosine").double(), 3 * h), euclidean.square() / 2)


def test_the_gibbs_link_is_the_softmax_of_cosines():
    h, w = problem()
    cosines = 1 - torch.from_numpy(cdist(h.double().numpy(), w.double().numpy(), "cosine"))
    log_probs = head_with(w, "cosine", link="gibbs", tau=0.3).log_probs(h)
    torch.testing.assert_close(log_probs.double(), torch.log_softmax(cosines / 0.3, 1), rtol=1e-5, atol=1e-5)


def test_probabilities_ignore_the_length_of_every_single_row():
    h, w = problem()
    lengths = batch(31, 2, 1)[0].exp()
    before = head_with(w, "cosine", exponent=9.0).log_probs(h)
    torch.testing.assert_close(head_with(w * lengths, "cosine", exponent=9.0).log_probs(h * 7), before, rtol=1e-4, atol=1e-4)
