"""The baseline: logits are inner products, and the loss is the cross-entropy of every language model."""

import torch
from torch import nn

from heads.fused_loss import Operands, Recipe
from heads.head import Head, Problem
from heads.kernels.inner_product import Dot
from heads.links import Identity


class Linear(Head):
    """logits_k = h . w_k (+ b_k)."""

    defaults = {"bias": False}

    def __init__(self, n_embd, vocab_size, padded_vocab_size=None, **options):
        super().__init__(n_embd, vocab_size, padded_vocab_size, **options)
        if not isinstance(self.settings["bias"], bool):
            raise ValueError(f"bias {self.settings['bias']!r}: must be true or false")
        self.bias = nn.Parameter(torch.empty(vocab_size)) if self.settings["bias"] else None
        self.reset_parameters()

    def reset_parameters(self):
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def problem(self, hidden, training=False):
        return Problem(Recipe(Dot(), Identity(), self.vocab_size), Operands(hidden, self.weight, self.bias))

    def definition(self, h, w):
        """Logits of h (N, D) for w (V, D), in plain torch."""
        logits = h @ w.t()
        return logits if self.bias is None else logits + self.bias
