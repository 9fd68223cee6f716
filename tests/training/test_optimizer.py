import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from training.optimizer import build_optimizer, gradient_norms, learning_rate, split_parameters


class Model(nn.Module):
    """The parts that matter: a matrix, a bias, a norm, an embedding, and a head tied to it with a parameter of its own."""

    def __init__(self, tied=True):
        super().__init__()
        self.backbone = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Module()
        self.head.weight = self.backbone[0].weight if tied else nn.Parameter(torch.randn(11, 4))
        self.head.factor = nn.Parameter(torch.eye(4))


SETTINGS = SimpleNamespace(learning_rate=0.1, weight_decay=0.5, beta1=0.9, beta2=0.95)


@pytest.mark.parametrize("tied", [True, False])
def test_decay_acts_on_the_backbones_matrices_only_and_each_parameter_stands_once(tied):
    model = Model(tied)
    decayed, free = split_parameters(model)
    assert [id(p) for p in decayed] == [id(model.backbone[1].weight)]
    assert len(decayed + free) == len(list(model.parameters())) == len({id(p) for p in decayed + free})


def test_adamw_takes_its_settings_and_moves_only_the_decayed_without_a_gradient():
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, SETTINGS, torch.device("cpu"))
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.95)] * 2
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        shrunk = 1 - 0.1 * 0.5 if name == "backbone.1.weight" else 1.0
        torch.testing.assert_close(p.detach(), before[name] * shrunk)


def schedule(warmup_steps, decay_steps, min_lr=0.01):
    return SimpleNamespace(warmup_steps=warmup_steps, decay_steps=decay_steps, min_lr=min_lr)


def test_the_rate_warms_up_peaks_falls_as_a_cosine_and_stays_low():
    rates = [learning_rate(step, 1.0, schedule(4, 20)) for step in range(30)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a > b for a, b in zip(rates[4:20], rates[5:21], strict=True))
    assert rates[12] == pytest.approx(0.01 + 0.99 * (1 + math.cos(math.pi / 2)) / 2)
    assert rates[20:] == [0.01] * 10


@pytest.mark.parametrize("warmup, decay", [(0, 1), (1, 1), (0, 5), (5, 5), (0, 0)])
def test_the_rate_is_finite_and_positive_at_the_edges(warmup, decay):
    rates = [learning_rate(step, 1.0, schedule(warmup, decay)) for step in range(8)]
    assert all(0 < rate <= 1 for rate in rates)


@pytest.mark.parametrize("tied", [True, False])
def test_gradient_norms_are_those_of_the_flattened_gradient(tied):
    model = Model(tied)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    everything = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    head = torch.cat([p.grad.double().flatten() for p in model.head.parameters()])
    whole, in_head, in_backbone = gradient_norms(model).double().tolist()
    assert whole == pytest.approx(everything.norm().item(), rel=1e-6)
    assert in_head == pytest.approx(head.norm().item(), rel=1e-6)
    assert in_backbone == pytest.approx(math.sqrt(everything.norm().item() ** 2 - head.norm().item() ** 2), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_number_shows_in_the_norm(bad):
    model = Model()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.backbone[2].bias.grad[1] = bad
    assert not torch.isfinite(gradient_norms(model)[0])
