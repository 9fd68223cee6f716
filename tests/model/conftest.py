"""Small shapes, a plain softmax head, and `transformers` models with random weights: backbones are tested on their own."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMALL = dict(
    n_layer=2, n_head=4, n_embd=32, block_size=16, intermediate_size=None, dropout=0.0, bias=True, tie_weights=True,
    vocab_size=96, init_from=None, num_key_value_heads=None, rope_theta=1e4, rms_norm_eps=1e-6,
)  # fmt: skip
FAMILY = {"qwen2": dict(num_key_value_heads=2)}


@pytest.fixture
def model_config():
    """model_config(name, **changes) -> a `[model]` section."""
    return lambda name, **changes: SimpleNamespace(**{"name": name, **SMALL, **FAMILY.get(name, {}), **changes})


class PlainHead(nn.Module):
    """A dense softmax over the first `vocab_size` of `rows` rows: the least that a backbone needs beside it."""

    def __init__(self, n_embd: int, vocab_size: int, rows: int | None = None):
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = nn.Parameter(torch.randn(rows or vocab_size, n_embd) * 0.02)

    def logits(self, hidden):
        return hidden @ self.weight[: self.vocab_size].T

    def forward(self, hidden, targets, reduction="mean", label_smoothing=0.0):
        logits = self.logits(hidden)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction, label_smoothing=label_smoothing)

    def log_probs(self, hidden):
        return F.pad(self.logits(hidden).log_softmax(-1), (0, len(self.weight) - self.vocab_size), value=-torch.inf)

    def options(self):
        return {}


@pytest.fixture
def plain_head():
    return PlainHead


@pytest.fixture
def randomize():
    """randomize(module): gives every parameter a value far from its first one, so that no zero bias hides a mistake."""

    def apply(module: nn.Module, std: float = 0.1) -> nn.Module:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=std)
        return module

    return apply


@pytest.fixture
def transformers_model(randomize):
    """transformers_model(name, rows=96, tied=True) -> `transformers`' language model of the shapes in SMALL, random weights, evaluation mode."""

    def build(name: str, rows: int = 96, tied: bool = True) -> nn.Module:
        import transformers

        common = dict(vocab_size=rows, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None)
        if name == "gpt2":
            config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=16, **common)
            model = transformers.GPT2LMHeadModel(config)
        else:
            shape = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=128, max_position_embeddings=16)
            if name == "bert":
                model = transformers.BertForMaskedLM(transformers.BertConfig(**shape, **common))
            else:
                rope = {"rope_type": "default", "rope_theta": 1e4}
                model = transformers.Qwen2ForCausalLM(
                    transformers.Qwen2Config(**shape, num_key_value_heads=2, rope_parameters=rope, **common)
                )
        return randomize(model).eval()

    return build
