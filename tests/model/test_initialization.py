import pytest
import torch
from torch import nn

from model.initialization import initialize, normal, ones, truncated_normal, zeros


def test_every_parameter_gets_the_value_of_its_rule():
    layer = nn.LayerNorm(5)
    initialize(layer, {"weight": zeros, "bias": ones})
    assert layer.weight.eq(0).all() and layer.bias.eq(1).all()


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(ValueError, match="parameter bias of Linear has no initialisation rule"):
        initialize(nn.Linear(2, 2), {"weight": normal(0.02)})


def test_a_parameter_with_two_rules_is_named():
    with pytest.raises(ValueError, match="parameter weight of Linear has 2 initialisation rules"):
        initialize(nn.Linear(2, 2, bias=False), {"weight": normal(0.02), "w.*": zeros})


def test_a_rule_must_match_the_whole_name():
    with pytest.raises(ValueError, match="parameter 0.weight of Sequential"):
        initialize(nn.Sequential(nn.Linear(2, 2)), {"weight": zeros, r"0\.bias": zeros})


def test_normals_have_their_standard_deviation_and_truncated_ones_no_tail():
    wide, cut = torch.empty(100_000), torch.empty(100_000)
    normal(0.02)(wide), truncated_normal(0.02)(cut)
    assert abs(wide.std() - 0.02) < 3 * 0.02 / (2 * 100_000) ** 0.5
    assert wide.abs().max() > 0.06 and cut.abs().max() <= 0.04
    assert abs(cut.std() - 0.02 * 0.7737**0.5) < 2e-4  # variance of a normal cut at two standard deviations: 0.7737
