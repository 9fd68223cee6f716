"""GPT-2 against `transformers` with the same weights."""

import math

import pytest
import torch

from model import build_model
from model.hf_families import FAMILIES


@pytest.mark.parametrize("length", [1, 16])
def test_hidden_states_equal_transformers(model_config, transformers_model, length):
    theirs = transformers_model("gpt2")
    ours = build_model(model_config("gpt2")).eval()
    ours.load_state_dict(FAMILIES["gpt2"].take(theirs.state_dict(), ours.state_dict()))
    tokens = torch.randint(96, (3, length))
    torch.testing.assert_close(ours(tokens), theirs.transformer(tokens).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_the_embedding_is_the_input_embedding(model_config):
    backbone = build_model(model_config("gpt2"))
    assert backbone.token_embedding is backbone.wte and backbone.causal and backbone.block_size == 16


def test_first_weights_are_as_published(model_config):
    backbone = build_model(model_config("gpt2", n_embd=128, vocab_size=2048, block_size=512))
    residual = 0.02 / math.sqrt(2 * 2)
    expected = {"wte": 0.02, "wpe": 0.01, "h.1.attn.c_attn": 0.02, "h.1.mlp.c_fc": 0.02, "h.1.attn.c_proj": residual, "h.1.mlp.c_proj": residual}
    for name, std in expected.items():
        assert backbone.get_parameter(f"{name}.weight").std().item() == pytest.approx(std, rel=0.03)
    assert all(p.eq(0).all() for n, p in backbone.named_parameters() if n.endswith(".bias"))
    assert all(p.eq(1).all() for n, p in backbone.named_parameters() if "ln_" in n and n.endswith(".weight"))


def test_124_million_parameters(model_config):
    with torch.device("meta"):
        from model.gpt2 import GPT2

        backbone = GPT2(model_config("gpt2", n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257))
    assert sum(p.numel() for p in backbone.parameters()) == 124_439_808  # openai-community/gpt2
