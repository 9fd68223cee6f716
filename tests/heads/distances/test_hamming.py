import numpy as np
import torch
from scipy.spatial.distance import cdist

from tests.heads.distances.oracle import assert_distances, distances_of, head_with, problem
from tests.heads.harness import batch, head_gradients


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_soft_is_the_mean_difference_of_sigmoids():
    h, w = problem()
    for temperature in (1.0, 0.3):
        soft_h, soft_w = (sigmoid(part.double().numpy() / temperature) for part in (h, w))
        assert_distances(head_with(w, "hamming", temperature=temperature), h, np.abs(soft_h[:, None] - soft_w).mean(-1))


def test_soft_is_manhattan_on_sigmoid_features():
    h, w = problem()
    manhattan = distances_of(head_with(torch.sigmoid(w), "manhattan"), torch.sigmoid(h))
    torch.testing.assert_close(distances_of(head_with(w, "hamming"), h), manhattan / 9, rtol=1e-6, atol=0)


def test_hard_is_scipys_hamming_of_bits():
    h, w = problem()
    h[3] = w[4]  # equal bits: floored, 1e-6 of the rows' norms
    d = distances_of(head_with(w, "hamming", relaxation="hard"), h)
    torch.testing.assert_close(d, torch.from_numpy(cdist((h > 0).numpy(), (w > 0).numpy(), "hamming")), rtol=1e-6, atol=2e-6)
    assert (d > 0).all()


def test_hard_has_the_soft_distances_derivative():
    """Under the Gibbs link dL/dd is (t - p) / tau whatever d is: with p of the hard head, pulled back through the soft distance."""
    h, w = problem()
    targets = batch(17, 31, 9)[1]
    head = head_with(w, "hamming", relaxation="hard", link="gibbs", tau=0.2)
    _, grads = head_gradients(head, h, targets, reduction="sum")
    pull = -head.log_probs(h).double().exp()
    pull[torch.arange(17), targets] += 1
    h64, w64 = (part.double().requires_grad_() for part in (h, w))
    soft = (torch.sigmoid(h64)[:, None] - torch.sigmoid(w64)).abs().mean(-1)
    expected = torch.autograd.grad((pull / 0.2 * soft).sum(), (h64, w64))
    torch.testing.assert_close(grads["hidden"].double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads["weight"].double(), expected[1], rtol=1e-4, atol=1e-5)


def test_gumbel_is_soft_in_evaluation_and_noisy_while_training():
    h, w = problem()
    soft, gumbel = head_with(w, "hamming", exponent=9.0), head_with(w, "hamming", relaxation="gumbel", exponent=9.0)
    targets = batch(17, 31, 9)[1]
    assert gumbel(h, targets) == soft(h, targets)
    assert gumbel.train()(h, targets) != soft(h, targets)
