import math

import torch

from heads.noise import logistic_noise
from tests.heads.harness import batch, head_gradients, make_head


def test_it_is_a_function_of_seed_and_position():
    short, long = logistic_noise(torch.zeros(3, 100), 5), logistic_noise(torch.zeros(3000, 100), 5)
    assert torch.equal(short, long[:3])
    assert not torch.equal(short, logistic_noise(torch.zeros(3, 100), 6))


def test_it_is_logistic_and_independent():
    noise = logistic_noise(torch.zeros(1000, 500), 11)
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - math.pi / 3**0.5) < 0.01
    u = torch.sigmoid(noise).flatten()
    counts = torch.histc(u, 50, 0, 1) / len(u) * 50
    assert (counts - 1).abs().max() < 0.05
    for other in (logistic_noise(torch.zeros(1000, 500), 12).flatten(), noise.flatten().roll(1), noise.flatten().roll(500)):
        assert abs(torch.corrcoef(torch.stack([noise.flatten(), other]))[0, 1]) < 0.005


def test_a_gumbel_head_draws_one_seed_per_training_forward_and_recomputes_with_it():
    head = make_head("hamming", 33, 101, relaxation="gumbel", exponent=9.0)
    hidden, targets = batch(7, 101, 33)
    quiet = head(hidden, targets)
    assert quiet == head(hidden, targets)
    head.train()
    torch.manual_seed(0)
    loss, grads = head_gradients(head, hidden, targets)
    torch.manual_seed(0)
    head.zero_grad()
    again = hidden.clone().requires_grad_()
    head(again, targets, reduction="none").mean().backward()  # forms its gradients in the backward pass
    torch.testing.assert_close(again.grad, grads["hidden"], rtol=1e-5, atol=1e-7)
    assert loss != quiet and head(hidden, targets) != loss
    assert torch.equal(head.log_probs(hidden), head.eval().log_probs(hidden))  # evaluation is without noise
