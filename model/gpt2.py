"""GPT-2 (Radford et al., 2019): a pre-LayerNorm decoder. Tokens in, hidden states out.

Parameters carry the names of OpenAI's checkpoints, which are also Hugging Face's.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.initialization import Initializer, normal, ones, zeros


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache=None) -> Tensor:
        B, T, D = x.shape
        query, key, value = (
            part.view(B, T, self.n_head, D // self.n_head).transpose(1, 2)  # (B, n_head, T, head_dim)
            for part in self.c_attn(x).split(D, dim=2)
        )
        if cache is not None:
            key, value = cache.append(key, value)  # (B, n_head, past + T, head_dim)
        y = F.scaled_dot_product_attention(
            query, key, value,
            dropout_p=self.dropout if self.training else 0.0,
            # A single query is the last position: it sees every key. To torch.compile, "T > 1" alone is no bool.
            is_causal=True if T > 1 else False,
        )
        y = y.transpose(1, 2).reshape(B, T, D)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.intermediate_size or GPT2.default_intermediate_size(config.n_embd)
        self.c_fc = nn.Linear(config.n_embd, width, bias=config.bias)
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c_fc(x), approximate="tanh")  # GPT-2's GELU is the tanh approximation, not the exact one
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache=None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT2(nn.Module):
    """GPT-2's backbone: hidden states after the last LayerNorm, no logits.

    `config`: `n_layer`, `n_head`, `n_embd`, `block_size`, `vocab_size` (rows of the embedding), `intermediate_size`, `dropout`, `bias`.
    Raises ValueError naming both values where `n_head` does not divide `n_embd`.
    """

    causal = True

    def __init__(self, config):
        super().__init__()
        self.block_size = config.block_size
        self.n_layer = config.n_layer
        self.activation_checkpointing = False
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)

    @staticmethod
    def default_intermediate_size(n_embd: int) -> int:
        return 4 * n_embd

    @property
    def token_embedding(self) -> nn.Embedding:
        return self.wte

    def initializers(self) -> dict[str, Initializer]:
        """The released code's standard deviations; the layers that end on the residual stream are scaled by
        1/sqrt(number of residual layers) (Radford et al., section 2.3), two of them per block."""
        return {
            r"wte\.weight": normal(0.02),
            r"wpe\.weight": normal(0.01),
            r"h\.\d+\.(attn\.c_attn|mlp\.c_fc)\.weight": normal(0.02),
            r"h\.\d+\.(attn|mlp)\.c_proj\.weight": normal(0.02 / math.sqrt(2 * self.n_layer)),
            r"(h\.\d+\.ln_[12]|ln_f)\.weight": ones,
            r".*\.bias": zeros,
        }

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache=None) -> Tensor:
        """Hidden states (B, T, n_embd) of `tokens` (B, T); of the flat `positions` (N,) into B * T only: (N, n_embd).

        With a `cache` (model.generation.KeyValueCache) the tokens follow those that it holds.
        Raises ValueError for a sequence longer than `block_size`.
        """
        past, T = (cache.length if cache is not None else 0), tokens.size(1)
        if past + T > self.block_size:
            raise ValueError(f"a sequence of {past + T} tokens is longer than block_size={self.block_size}")
        place = torch.arange(past, past + T, device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(place))  # (B, T, n_embd)
        for i, block in enumerate(self.h):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, cache.layers[i] if cache is not None else None)
        x = self.ln_f(x)
        return x if positions is None else x.flatten(0, 1)[positions]  # (N, n_embd)
