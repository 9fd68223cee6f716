"""Qwen2 against `transformers` with the same weights; its rotary table; its grouped heads."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from model import build_model
from model.hf_families import FAMILIES
from model.qwen2 import CausalSelfAttention, rotary_table, rotate


@pytest.mark.parametrize("length", [1, 16])
def test_hidden_states_equal_transformers(model_config, transformers_model, length):
    theirs = transformers_model("qwen2")
    ours = build_model(model_config("qwen2", intermediate_size=128)).eval()
    ours.load_state_dict(FAMILIES["qwen2"].take(theirs.state_dict(), ours.state_dict()))
    tokens = torch.randint(96, (3, length))
    torch.testing.assert_close(ours(tokens), theirs.model(tokens).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_the_rotary_table_is_float32_under_every_cast():
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            cos, sin = rotary_table(0, 2048, 64, 1e6)
        assert cos.dtype == sin.dtype == torch.float32
        angles = np.arange(2048)[:, None] / 1e6 ** (np.arange(0, 64, 2) / 64)
        np.testing.assert_allclose(cos[:, :32], np.cos(angles), atol=3e-4)  # float32 angles of up to 2048 rad
        np.testing.assert_allclose(sin[:, 32:], np.sin(angles), atol=3e-4)


def test_casting_the_model_leaves_no_table_to_round(model_config):
    backbone = build_model(model_config("qwen2"))
    assert list(backbone.buffers()) == []
    assert not [name for name in backbone.state_dict() if "rot" in name]


def test_scores_depend_on_the_distance_of_positions_only():
    query, key = torch.randn(1, 64), torch.randn(1, 64)

    def score(i, j):
        return (rotate(query, *rotary_table(i, 1, 64, 1e6)) * rotate(key, *rotary_table(j, 1, 64, 1e6))).sum()

    for shift in (1, 100, 900):
        torch.testing.assert_close(score(5 + shift, 2 + shift), score(5, 2), atol=1e-3, rtol=1e-4)
    assert not torch.allclose(score(6, 2), score(5, 2))


def test_grouped_heads_equal_repeated_ones(model_config):
    """Key/value head i serves query heads g*i .. g*i+g-1: the order of repeat_interleave, not of repeat."""
    grouped = CausalSelfAttention(model_config("qwen2", n_head=4, num_key_value_heads=2))
    full = CausalSelfAttention(model_config("qwen2", n_head=4, num_key_value_heads=4))
    state = grouped.state_dict()
    for kind in ("k_proj", "v_proj"):
        for part in ("weight", "bias"):
            heads = state[f"{kind}.{part}"].unflatten(0, (2, 8))
            state[f"{kind}.{part}"] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x, table = torch.randn(2, 16, 32), rotary_table(0, 16, 8, 1e4)
    torch.testing.assert_close(grouped(x, *table), full(x, *table), atol=1e-6, rtol=1e-5)


def test_as_many_key_value_heads_as_heads_is_plain_attention(model_config):
    attention = CausalSelfAttention(model_config("qwen2", num_key_value_heads=None))
    x = torch.randn(1, 16, 32)
    cos, sin = rotary_table(0, 16, 8, 1e4)
    query, key, value = (
        layer(x).view(1, 16, 4, 8).transpose(1, 2) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    scores = rotate(query, cos, sin) @ rotate(key, cos, sin).transpose(-1, -2) / 8**0.5
    weights = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf).softmax(-1)
    expected = F.linear((weights @ value).transpose(1, 2).reshape(1, 16, 32), attention.o_proj.weight)
    torch.testing.assert_close(attention(x, cos, sin), expected, atol=1e-6, rtol=1e-5)


def test_groups_must_divide_the_heads(model_config):
    with pytest.raises(ValueError, match="n_head=4 is not divisible by num_key_value_heads=3"):
        build_model(model_config("qwen2", num_key_value_heads=3))


def test_an_odd_rotary_width_is_refused(model_config):
    with pytest.raises(ValueError, match="n_embd=20 / n_head=4 is 5"):
        build_model(model_config("qwen2", n_embd=20))


def test_the_default_mlp_is_about_eight_thirds_wide(model_config):
    for n_embd, width in ((96, 256), (384, 1024), (768, 2048), (100, 320)):
        backbone = build_model(model_config("qwen2", n_embd=n_embd, n_head=2, num_key_value_heads=1, n_layer=1))
        assert backbone.layers[0].mlp.up_proj.out_features == width


def test_494_million_parameters(model_config):
    from model.qwen2 import Qwen2

    with torch.device("meta"):
        backbone = Qwen2(
            model_config("qwen2", n_layer=24, n_head=14, num_key_value_heads=2, n_embd=896, intermediate_size=4864, vocab_size=151936)
        )
    assert sum(p.numel() for p in backbone.parameters()) == 494_032_768  # Qwen/Qwen2-0.5B
