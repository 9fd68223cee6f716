"""Text from a trained model: token by token with a key/value cache, or by filling in masks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class LayerCache:
    """Keys and values of one layer, (B, n_kv_head, capacity, head_dim) each, filled from the left."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys = self.values = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds (B, n_kv_head, T, head_dim) and returns all there are, (B, n_kv_head, length, head_dim).

        Raises ValueError where several tokens would follow others: attention masks them as if they came first.
        """
        B, n_kv_head, T, head_dim = key.shape
        if T > 1 and self.length > 0:
            raise ValueError(f"{T} tokens at once cannot follow the {self.length} that the cache holds: one at a time")
        if self.keys is None:
            self.keys = key.new_empty(B, n_kv_head, self.capacity, head_dim)
            self.values = torch.empty_like(self.keys)
        end = self.length + T
        self.keys[:, :, self.length : end] = key
        self.values[:, :, self.length : end] = value
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class KeyValueCache:
    """What the layers of a causal backbone computed for the tokens so far: one LayerCache each."""

    def __init__(self, n_layer: int, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(n_layer)]

    @property
    def length(self) -> int:
        return self.layers[0].length


COLDEST = 1e-6  # a temperature below it is 0: every other token would underflow anyway
HOTTEST = 1e6  # above it float32 sees a uniform distribution


@dataclass(frozen=True)
class Sampling:
    """How next tokens are chosen. Raises ValueError naming the value that cannot be."""

    max_new_tokens: int = 200
    num_samples: int = 1
    temperature: float = 1.0  # of the log-probabilities; 0: always the most probable token
    top_k: int | None = None  # choose among the k most probable tokens
    top_p: float | None = None  # choose among the most probable tokens that together hold this probability
    seed: int = 1337

    def __post_init__(self):
        for name, valid in (
            ("max_new_tokens", self.max_new_tokens >= 1),
            ("num_samples", self.num_samples >= 1),
            ("temperature", 0 <= self.temperature <= HOTTEST),
            ("top_k", self.top_k is None or self.top_k >= 1),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1),
            ("seed", 0 <= self.seed < 2**63),
        ):
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)} is out of range")


def choose(log_probs: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token (B,) per row of `log_probs` (B, rows), drawn as `sampling` says. Tokens of probability 0 are never chosen."""
    if sampling.temperature < COLDEST:
        return log_probs.argmax(dim=-1)
    scores = (log_probs.float() - log_probs.float().amax(dim=-1, keepdim=True)) / sampling.temperature  # (B, rows), the best at 0
    tokens = None  # the token at each place of a row; None: place k is token k
    if sampling.top_k is not None or sampling.top_p is not None:
        scores, tokens = scores.topk(min(sampling.top_k or scores.size(-1), scores.size(-1)), dim=-1)  # sorted, the best first
    probs = scores.softmax(dim=-1)
    if sampling.top_p is not None:  # drop a token if those before it already hold top_p; the first always stays
        dropped = probs.cumsum(dim=-1) - probs >= sampling.top_p
        dropped[..., 0] = False
        probs[dropped] = 0.0
    place = torch.multinomial(probs.cpu(), 1, generator=generator).to(log_probs.device)  # on the CPU: one seed, one text, any device
    return (place if tokens is None else tokens.gather(1, place))[:, 0]


def window_start(length: int, block_size: int) -> int:
    """First of `length` tokens that the model sees. Up to `block_size` it sees them all; beyond, the window moves on by half
    a block at a time, so that a cache is refilled once per half block instead of at every token."""
    hop = max(1, block_size // 2)
    return max(0, -(-(length - block_size) // hop) * hop)


@torch.inference_mode()
def stream(model: nn.Module, prompt: Tensor, sampling: Sampling, use_cache: bool = True) -> Iterator[Tensor]:
    """Yields the next token (num_samples,) of every sample, `max_new_tokens` times.

    `model`: a LanguageModel with a causal backbone, in evaluation mode. `prompt` (T,): token ids, at least one.
    Beyond `block_size` the context is windowed (see `window_start`); the window depends on the length alone, so the
    tokens are the same with and without the cache. Raises ValueError for an empty prompt or a bidirectional backbone.
    """
    backbone = model.backbone
    if not backbone.causal:
        raise ValueError("a bidirectional model does not continue text; it fills in masks")
    if prompt.numel() == 0:
        raise ValueError("the prompt is empty: give at least one token")
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = prompt.expand(sampling.num_samples, -1)  # (num_samples, T)
    cache, cached_from = None, -1
    for _ in range(sampling.max_new_tokens):
        start = window_start(tokens.size(1), backbone.block_size)
        if not use_cache:
            hidden = backbone(tokens[:, start:])
        elif start == cached_from:
            hidden = backbone(tokens[:, -1:], cache=cache)
        else:
            cache, cached_from = KeyValueCache(backbone.n_layer, backbone.block_size), start
            hidden = backbone(tokens[:, start:], cache=cache)
        chosen = choose(model.head.log_probs(hidden[:, -1]), sampling, generator)  # (num_samples,)
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
        yield chosen


def generate(model: nn.Module, prompt: Tensor, sampling: Sampling, use_cache: bool = True) -> Tensor:
    """The new tokens (num_samples, max_new_tokens) that follow `prompt` (T,). Arguments and errors of `stream`."""
    return torch.stack(list(stream(model, prompt, sampling, use_cache)), dim=1)


@torch.inference_mode()
def fill_masks(model: nn.Module, tokens: Tensor, mask_token_id: int, sampling: Sampling) -> Tensor:
    """`tokens` (T,) with every mask replaced, (num_samples, T).

    One mask per pass, the one the model is surest of, so that later words are chosen knowing the earlier ones.
    `model`: a LanguageModel with a bidirectional backbone, in evaluation mode. Raises ValueError if there is no mask.
    """
    if model.backbone.causal:
        raise ValueError("a causal model continues text; it does not fill in masks")
    if not (tokens == mask_token_id).any():
        raise ValueError(f"there is no mask (id {mask_token_id}) to fill in")
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = tokens.repeat(sampling.num_samples, 1)
    row = torch.arange(sampling.num_samples, device=tokens.device)
    while (tokens[0] == mask_token_id).any():
        masks = (tokens == mask_token_id).flatten().nonzero()[:, 0]  # flat positions, the same number in every sample
        log_probs = model.head.log_probs(model.backbone(tokens, masks)).unflatten(0, (sampling.num_samples, -1))
        log_probs[..., mask_token_id] = -torch.inf  # where the mask is a word's id (a choice of the config), it is still no answer
        surest = log_probs.amax(dim=-1).argmax(dim=-1)  # (num_samples,)
        place = masks.view(sampling.num_samples, -1)[row, surest] % tokens.size(1)
        tokens[row, place] = choose(log_probs[row, surest], sampling, generator)
    return tokens
