"""Small shapes and a plain linear head, so that backbones are tested on their own."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

SMALL = dict(
    n_layer=2, n_head=4, n_embd=32, block_size=16, intermediate_size=None, dropout=0.0, bias=True, tie_weights=True,
    vocab_size=96, init_from=None, num_key_value_heads=2, rope_theta=1e6, rms_norm_eps=1e-6,
)


@pytest.fixture
def model_config():
    """model_config(name, **changes) -> a `[model]` section."""
    return lambda name, **changes: SimpleNamespace(**{"name": name, **SMALL, **changes})


class PlainHead(nn.Module):
    """A dense softmax over rows: the least that a backbone needs beside it."""

    def __init__(self, n_embd: int, vocab_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab_size, n_embd) * 0.02)

    def forward(self, hidden, targets, reduction="mean", label_smoothing=0.0):
        logits = hidden @ self.weight.T
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction, label_smoothing=label_smoothing)

    def log_probs(self, hidden):
        return (hidden @ self.weight.T).log_softmax(-1)


@pytest.fixture
def plain_head():
    return PlainHead
