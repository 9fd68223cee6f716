"""Backbones: tokens (B, T) -> hidden states (B, T, D). They know nothing of heads, and nothing of each other."""

import torch
from torch import nn

from model.bert import Bert
from model.gpt2 import GPT2
from model.initialization import initialize
from model.qwen2 import Qwen2

BACKBONES = {
    "gpt2": GPT2,
    "bert": Bert,
    "qwen2": Qwen2,
}


def build_model(config) -> nn.Module:
    """The backbone that `config` (a `[model]` section with `vocab_size` set) describes, initialised as its authors publish it.

    Draws from torch's default generator. Raises ValueError for an unknown name (listing what exists), for a shape
    that cannot exist (naming both values), and if a parameter would be initialised never or twice.
    """
    if config.name not in BACKBONES:
        raise ValueError(f"unknown model {config.name!r}; there are {', '.join(BACKBONES)}")
    if config.vocab_size is None:
        raise ValueError("model.vocab_size is not set: it is the number of rows of the token embedding")
    with torch.device("meta"):  # no memory and no random numbers for values that would be overwritten at once
        backbone = BACKBONES[config.name](config)
    backbone.to_empty(device="cpu")
    initialize(backbone, backbone.initializers())
    return backbone
