"""Qwen2 (Yang et al., 2024, arXiv 2407.10671): RMSNorm, rotary positions, grouped-query attention, SwiGLU. Tokens in, hidden states out.

Parameters carry the names of the released checkpoints.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.initialization import Initializer, normal, ones, zeros


def rotary_table(start: int, length: int, head_dim: int, theta: float, device=None) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, head_dim) of the rotary angles of positions start..start+length-1.

    Computed where they are used and always in float32, so that neither `model.bfloat16()` nor autocast can round a position.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)  # (head_dim/2,)
    place = torch.arange(start, start + length, dtype=torch.float32, device=device)
    angles = (place[:, None] * frequencies).repeat(1, 2)  # the two halves of a head turn by the same angles
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (..., T, head_dim): the pairs are (i, i + head_dim/2), the products in float32."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.n_kv_head = config.num_key_value_heads or config.n_head
        if config.n_embd % self.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is not divisible by num_key_value_heads={self.n_kv_head}")
        self.head_dim = config.n_embd // self.n_head
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head width: n_embd={config.n_embd} / n_head={self.n_head} is {self.head_dim}")
        self.dropout = config.dropout
        self.q_proj = nn.Linear(config.n_embd, self.n_head * self.head_dim, bias=config.bias)
        self.k_proj = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=config.bias)
        self.v_proj = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=config.bias)
        self.o_proj = nn.Linear(self.n_head * self.head_dim, config.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache=None) -> Tensor:
        B, T, D = x.shape
        query = rotate(self.q_proj(x).view(B, T, self.n_head, self.head_dim).transpose(1, 2), cos, sin)  # (B, n_head, T, head_dim)
        key = rotate(self.k_proj(x).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2), cos, sin)  # (B, n_kv_head, T, head_dim)
        value = self.v_proj(x).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2)  # (B, n_kv_head, T, head_dim)
        if cache is not None:
            key, value = cache.append(key, value)  # (B, n_kv_head, past + T, head_dim)
        y = F.scaled_dot_product_attention(
            query, key, value,
            dropout_p=self.dropout if self.training else 0.0,
            # A single query is the last position: it sees every key. To torch.compile, "T > 1" alone is no bool.
            is_causal=True if T > 1 else False,
            enable_gqa=self.n_kv_head != self.n_head,  # query heads g*i .. g*i+g-1 share key/value head i
        )
        return self.o_proj(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.intermediate_size or Qwen2.default_intermediate_size(config.n_embd)
        self.gate_proj = nn.Linear(config.n_embd, width, bias=False)
        self.up_proj = nn.Linear(config.n_embd, width, bias=False)
        self.down_proj = nn.Linear(width, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.n_embd, eps=config.rms_norm_eps)
        self.self_attn = CausalSelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.n_embd, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache=None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Qwen2(nn.Module):
    """Qwen2's backbone: hidden states after the last RMSNorm, no logits.

    `config`: `n_layer`, `n_head`, `num_key_value_heads`, `n_embd`, `block_size`, `vocab_size` (rows of the embedding),
    `intermediate_size`, `rope_theta`, `rms_norm_eps`, `bias` (of query, key and value only) and `dropout` (of the
    attention weights only), as in the released model. Raises ValueError naming both values of an impossible shape.
    """

    causal = True

    def __init__(self, config):
        super().__init__()
        self.block_size = config.block_size
        self.n_layer = config.n_layer
        self.rope_theta = config.rope_theta
        self.head_dim = config.n_embd // config.n_head
        self.activation_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=config.rms_norm_eps)

    @staticmethod
    def default_intermediate_size(n_embd: int) -> int:
        """8/3 of the width, where three SwiGLU matrices hold as many weights as two of the usual 4 n_embd, in multiples of 64."""
        return -(-8 * n_embd // (3 * 64)) * 64

    @property
    def token_embedding(self) -> nn.Embedding:
        return self.embed_tokens

    def initializers(self) -> dict[str, Initializer]:
        """The released configuration's `initializer_range`, 0.02 for every matrix."""
        return {
            r"embed_tokens\.weight": normal(0.02),
            r"layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight": normal(0.02),
            r"layers\.\d+\.self_attn\.[qkv]_proj\.bias": zeros,
            r"(layers\.\d+\.(input|post_attention)_layernorm|norm)\.weight": ones,
        }

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache=None) -> Tensor:
        """Hidden states (B, T, n_embd) of `tokens` (B, T); of the flat `positions` (N,) into B * T only: (N, n_embd).

        With a `cache` (model.generation.KeyValueCache) the tokens follow those that it holds.
        Raises ValueError for a sequence longer than `block_size`.
        """
        past, T = (cache.length if cache is not None else 0), tokens.size(1)
        if past + T > self.block_size:
            raise ValueError(f"a sequence of {past + T} tokens is longer than block_size={self.block_size}")
        cos, sin = rotary_table(past, T, self.head_dim, self.rope_theta, tokens.device)  # (T, head_dim)
        x = self.embed_tokens(tokens)  # (B, T, n_embd)
        for i, block in enumerate(self.layers):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin, cache.layers[i] if cache is not None else None)
        x = self.norm(x)
        return x if positions is None else x.flatten(0, 1)[positions]  # (N, n_embd)
