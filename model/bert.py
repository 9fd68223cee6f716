"""BERT (Devlin et al., 2019, arXiv 1810.04805): a bidirectional, post-LayerNorm encoder for masked-language modelling.

Tokens in, hidden states out, after the transform that stands between encoder and vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.initialization import Initializer, ones, truncated_normal, zeros

LAYER_NORM_EPS = 1e-12  # the released model's
N_SEGMENTS = 2  # sentences A and B


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.query = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.key = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.value = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.output = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.output_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        B, T, D = x.shape
        query, key, value = (
            projection(x).view(B, T, self.n_head, D // self.n_head).transpose(1, 2)  # (B, n_head, T, head_dim)
            for projection in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(B, T, D)
        return self.output_dropout(self.output(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.intermediate_size or Bert.default_intermediate_size(config.n_embd)
        self.up = nn.Linear(config.n_embd, width, bias=config.bias)
        self.down = nn.Linear(width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.n_embd, eps=LAYER_NORM_EPS, bias=config.bias)
        self.mlp = MLP(config)
        self.mlp_norm = nn.LayerNorm(config.n_embd, eps=LAYER_NORM_EPS, bias=config.bias)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.attention(x, mask))
        x = self.mlp_norm(x + self.mlp(x))
        return x


class Transform(nn.Module):
    """Dense, GELU, LayerNorm between the encoder and the vocabulary (the released code's `cls/predictions/transform`)."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.norm = nn.LayerNorm(config.n_embd, eps=LAYER_NORM_EPS, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x)))


class Bert(nn.Module):
    """BERT's backbone with its masked-LM transform, no logits and no pooler.

    `config`: `n_layer`, `n_head`, `n_embd`, `block_size`, `vocab_size` (rows of the embedding), `intermediate_size`, `dropout`, `bias`.
    Raises ValueError naming both values where `n_head` does not divide `n_embd`.
    """

    causal = False

    def __init__(self, config):
        super().__init__()
        self.block_size = config.block_size
        self.activation_checkpointing = False
        self.word_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        self.segment_embedding = nn.Embedding(N_SEGMENTS, config.n_embd)
        self.embedding_norm = nn.LayerNorm(config.n_embd, eps=LAYER_NORM_EPS, bias=config.bias)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.transform = Transform(config)

    @staticmethod
    def default_intermediate_size(n_embd: int) -> int:
        return 4 * n_embd

    @property
    def token_embedding(self) -> nn.Embedding:
        return self.word_embedding

    def initializers(self) -> dict[str, Initializer]:
        """The released code's: a normal of standard deviation 0.02 truncated at two of them, for every matrix."""
        return {
            r"(word|position|segment)_embedding\.weight": truncated_normal(0.02),
            r"layers\.\d+\.attention\.(query|key|value|output)\.weight": truncated_normal(0.02),
            r"layers\.\d+\.mlp\.(up|down)\.weight": truncated_normal(0.02),
            r"transform\.dense\.weight": truncated_normal(0.02),
            r"(embedding_norm|layers\.\d+\.(attention|mlp)_norm|transform\.norm)\.weight": ones,
            r".*\.bias": zeros,
        }

    def encode(self, tokens: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:
        """The encoder's output (B, T, n_embd), before the masked-LM transform. Arguments as in `forward`."""
        T = tokens.size(1)
        if T > self.block_size:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size={self.block_size}")
        mask = None
        if attention_mask is not None:
            seen = attention_mask.bool()
            seen = seen | ~seen.any(dim=1, keepdim=True)  # a row of nothing but padding attends to itself: finite, and ignored
            mask = seen[:, None, None, :]  # (B, 1, 1, T): every head and every query sees the same keys
        segments = torch.zeros_like(tokens) if token_type_ids is None else token_type_ids
        place = torch.arange(T, device=tokens.device)
        x = self.word_embedding(tokens) + self.segment_embedding(segments) + self.position_embedding(place)
        x = self.embedding_dropout(self.embedding_norm(x))  # (B, T, n_embd)
        for block in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return x

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, T, n_embd) of `tokens` (B, T); of the flat `positions` (N,) into B * T only: (N, n_embd).

        `attention_mask` (B, T): nonzero at real tokens, 0 at padding. `token_type_ids` (B, T): 0 or 1, by default 0.
        The positions are gathered before the transform, which then works on them alone.
        Raises ValueError for a sequence longer than `block_size`.
        """
        x = self.encode(tokens, attention_mask, token_type_ids)
        return self.transform(x if positions is None else x.flatten(0, 1)[positions])
