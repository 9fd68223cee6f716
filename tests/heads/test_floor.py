import torch

from heads.distances.euclidean import euclidean_norm
from heads.floor import Floor
from tests.heads.harness import head_gradients, make_head


def test_only_what_is_below_a_millionth_of_the_norms_is_raised():
    x, y = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]])
    u = torch.tensor([[1e-12, 45.0**2, 25.0]])
    index, mask = Floor(euclidean_norm, power=2).apply(u, euclidean_norm(x), lambda: euclidean_norm(y))
    torch.testing.assert_close(u, torch.tensor([[1e-10, 45.0**2, 25.0]]))  # (1e-6 * (5 + 5))^2
    assert index.tolist() == [0] and mask.tolist() == [[True, False, False]]
    assert Floor(euclidean_norm, power=2).apply(u[:, 1:].clone(), euclidean_norm(x), lambda: euclidean_norm(y[1:])) is None


def test_two_zero_vectors_have_a_positive_distance():
    u = torch.zeros(1, 1)
    Floor(euclidean_norm, power=2).apply(u, torch.zeros(1), lambda: torch.zeros(1))
    assert u.item() > 0 and torch.isfinite(u.log()).all()


def test_floored_pairs_pull_nothing():
    """At another word's prototype that word has all the probability; the gradient is the target's alone."""
    head = make_head("euclidean", 5, 3, exponent=2.0)
    hidden = head.weight[1:2].detach().clone()
    loss, grads = head_gradients(head, hidden, torch.tensor([0]))
    assert loss > 20 and (grads["weight"][1] == 0).all()
    difference = hidden[0] - head.weight[0].detach()
    torch.testing.assert_close(grads["hidden"][0], 2.0 * difference / difference.square().sum())
