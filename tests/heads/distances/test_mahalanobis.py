import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from tests.heads.distances.oracle import assert_distances, distances_of, head_with, problem
from tests.heads.harness import batch, head_gradients

COVARIANCES = ["diagonal", "cholesky", "full"]
every_covariance = pytest.mark.parametrize("covariance", COVARIANCES)


def learned(head, seed=6):
    """The head with parameters as training might leave them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            if key != "weight":
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return head


def precision(head):
    M = head.metric().detach().double().numpy()
    return np.diag(M) if M.ndim == 1 else M


@every_covariance
def test_it_is_scipys(covariance):
    h, w = problem()
    head = learned(head_with(w, "mahalanobis", covariance=covariance)).double()  # one M for both precisions
    expected = cdist(h.double().numpy(), w.double().numpy(), "mahalanobis", VI=precision(head))
    assert_distances(head, h.double(), expected)
    torch.testing.assert_close(distances_of(head.float(), h), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


@every_covariance
def test_it_starts_as_the_euclidean_head(covariance):
    h, w = problem()
    targets = batch(17, 31, 9)[1]
    loss, grads = head_gradients(head_with(w, "mahalanobis", covariance=covariance, exponent=7.0), h, targets)
    expected_loss, expected = head_gradients(head_with(w, "euclidean", exponent=7.0), h, targets)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(grads["hidden"], expected["hidden"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grads["weight"], expected["weight"], rtol=1e-4, atol=1e-6)


@every_covariance
def test_it_is_euclidean_after_one_linear_map(covariance):
    h, w = (part.double() for part in problem())
    head = learned(head_with(w, "mahalanobis", covariance=covariance).double())
    factor = torch.linalg.cholesky(torch.from_numpy(precision(head)))
    torch.testing.assert_close(distances_of(head_with(w @ factor, "euclidean").double(), h @ factor), distances_of(head, h))


@every_covariance
def test_the_metric_stays_positive_definite(covariance):
    head = head_with(problem()[1], "mahalanobis", covariance=covariance)
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            if key != "weight":
                parameter.zero_() if covariance == "full" else parameter.sub_(3)
    assert np.linalg.eigvalsh(precision(head)).min() > 0


def test_fewer_tokens_than_dimensions():
    h, w = batch(2, 2, 32)[0], batch(31, 2, 32, seed=9)[0]
    for covariance in COVARIANCES:
        loss, grads = head_gradients(head_with(w, "mahalanobis", covariance=covariance), h, torch.tensor([1, 2]))
        assert torch.isfinite(loss) and all(torch.isfinite(grad).all() for grad in grads.values())
