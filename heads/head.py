"""A vocabulary head: prototypes, and what they make of a hidden state: a loss, log-probabilities, distances.

    p_k = d(h, w_k)^(-n) / sum_j d(h, w_j)^(-n)    harmonic link (Baek et al., arXiv 2502.01628)
    p_k = softmax of -d(h, w_k) / tau              Gibbs link

A distance is a map of the rows, a pairwise kernel, a separable rescaling (Miller-Golub et al., arXiv 2603.10225, section 3.1).
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heads.fused_loss import Operands, Recipe, chunks_of_values, fused_loss

IGNORED = -100  # the target that contributes nothing


class Problem(NamedTuple):
    """One batch of hidden states as the fused loss takes it."""

    recipe: Recipe
    operands: Operands
    unit: Tensor | float = 1.0  # rows were multiplied by this before the kernel saw them


def outside_compiled_graphs(method):
    """torch.compile of a model leaves this method of its head as it is: the loss has compiled what can be, and branches on values.

    torch's own wrapper takes a second to import: it is made at the first call under torch.compile.
    """
    wrapped = []

    @functools.wraps(method)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            return method(*args, **kwargs)
        if not wrapped:
            wrapped.append(torch.compiler.disable(method))
        return wrapped[0](*args, **kwargs)
    return call


class Head(nn.Module):
    """Prototypes `weight` (rows, n_embd), of which the first `vocab_size` are words; the other rows have probability exactly 0.

    Raises ValueError, naming the argument, for sizes below 1, padded_vocab_size < vocab_size, unknown options and bad values.
    """

    defaults: dict = {}  # every option with its default: the one place where it is written
    init_std = 0.02  # of untied prototypes, N(0, init_std^2)
    needs_calibration = False  # whether `calibrate` has to see hidden states before the first loss
    exponent_value = None  # the exponent n in use, a number; None where there is none

    def __init__(self, n_embd: int, vocab_size: int, padded_vocab_size: int | None = None, **options):
        super().__init__()
        rows = vocab_size if padded_vocab_size is None else padded_vocab_size
        if n_embd < 1 or vocab_size < 1 or rows < vocab_size:
            raise ValueError(f"n_embd {n_embd}, vocab_size {vocab_size}, padded_vocab_size {padded_vocab_size}: need n_embd >= 1 and "
                             "padded_vocab_size >= vocab_size >= 1")
        unknown = sorted(key for key in options if key not in self.defaults and options[key] is not None)
        if unknown:
            raise ValueError(f"{type(self).__name__} head: unknown option {', '.join(unknown)}; it has: {', '.join(sorted(self.defaults))}")
        self.n_embd, self.vocab_size = n_embd, vocab_size
        self.given = {key: value for key, value in options.items() if value is not None}
        self.settings = self.defaults | self.given
        self.weight = nn.Parameter(torch.empty(rows, n_embd))  # a subclass ends its own __init__ with reset_parameters()

    def options(self) -> dict:
        """Every option that applies, with the value used ("auto" stays "auto")."""
        return dict(self.settings)

    def reset_parameters(self) -> None:
        """Draws untied prototypes from torch's default generator; every other parameter and buffer is as in a new head."""
        nn.init.normal_(self.weight, std=self.init_std)

    def prepare(self, flat: Tensor, kept: Tensor | None = None) -> None:
        """Called before `problem` with hidden states (N, D) and which of them count (a mask or indices; None: all)."""

    def problem(self, hidden: Tensor, training: bool = False) -> Problem:
        """hidden (N, D), float32 or float64 -> what the fused loss needs; autocast is off."""
        raise NotImplementedError

    @outside_compiled_graphs
    def forward(self, hidden: Tensor, targets: Tensor, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy in nats. hidden (..., D); targets (...), ids below vocab_size, or -100 to ignore a position.

        reduction: "mean" over the positions not ignored (0 if there are none), "sum", or "none" (the targets' shape, 0 where ignored).
        label_smoothing: the share of the target spread over the vocab_size words.
        Raises ValueError for shapes, dtypes, values and targets that do not fit (targets on CUDA out of range give a NaN loss instead,
        as looking would stall the device).
        """
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction {reduction!r}: must be mean, sum or none")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing {label_smoothing}: must be at least 0 and below 1")
        flat = self._flat(hidden)
        kept, targets, weights = self._scored(targets, hidden.shape[:-1])
        self.prepare(flat, kept)
        if kept is not None:
            flat = flat[kept] if kept.dtype != torch.bool else torch.where(kept[:, None], flat, 0.0)
        flat = widened(flat)
        weights = weights.to(flat.dtype)
        if reduction == "mean":
            weights = weights / (weights != 0).sum().clamp(min=1)
        with torch.autocast(hidden.device.type, enabled=False):
            problem = self.problem(flat, training=self.training)
        recipe = problem.recipe._replace(label_smoothing=label_smoothing, dtype=product_dtype(hidden))
        loss = fused_loss(recipe, problem.operands, targets, weights, per_token=reduction == "none").to(flat.dtype)
        if reduction != "none":
            return loss
        if kept is not None and kept.dtype != torch.bool:
            loss = loss.new_zeros(hidden.shape[:-1].numel()).index_copy(0, kept, loss)
        return loss.view(hidden.shape[:-1])

    @outside_compiled_graphs
    @torch.no_grad()
    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (..., rows) of hidden (..., D), without gradient; -inf in the padded rows."""
        flat = self._flat(hidden)
        self.prepare(flat)
        with torch.autocast(hidden.device.type, enabled=False):
            flat = widened(flat)
            recipe, operands, _ = self.problem(flat)
            recipe = recipe._replace(dtype=product_dtype(hidden))
            out = flat.new_full((len(flat), len(self.weight)), -torch.inf)
            for rows, u, ratio in chunks_of_values(recipe, operands):
                z = recipe.link.logits(u, ratio, operands.sharpness)
                out[rows, : self.vocab_size] = torch.log_softmax(z, 1)
        return out.view(*hidden.shape[:-1], len(self.weight))

    def _flat(self, hidden):
        if not hidden.is_floating_point():
            raise ValueError(f"hidden has dtype {hidden.dtype}: hidden states must be floating point")
        if hidden.shape[-1:] != (self.n_embd,):
            raise ValueError(f"hidden has shape {tuple(hidden.shape)}: its last dimension must be n_embd = {self.n_embd}")
        return hidden.reshape(-1, self.n_embd)

    def _scored(self, targets, shape):
        """(kept, targets, weights): which of the flat positions to score (None: all; indices on a CPU, a mask elsewhere), and how."""
        if targets.shape != shape:
            raise ValueError(f"targets have shape {tuple(targets.shape)}, hidden states {tuple(shape)} positions: they must be equal")
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise ValueError(f"targets have dtype {targets.dtype}: they must be integer ids")
        targets = targets.reshape(-1).long()
        valid = targets != IGNORED
        wrong = valid & ((targets < 0) | (targets >= self.vocab_size))
        if targets.device.type != "cpu":  # no look at the values, which would wait for the device
            weights = torch.where(wrong, torch.nan, valid.float())
            return valid, targets.clamp(0, self.vocab_size - 1), weights
        if wrong.any():
            raise ValueError(f"target {targets[wrong][0].item()} is not a word: ids go from 0 to V - 1 = {self.vocab_size - 1} "
                             f"(or {IGNORED}, to ignore a position)")
        kept = None if valid.all() else valid.nonzero()[:, 0]
        targets = targets if kept is None else targets[kept]
        return kept, targets, torch.ones(len(targets))

    def extra_repr(self):
        options = "".join(f", {key}={value!r}" for key, value in self.options().items())
        return f"n_embd={self.n_embd}, vocab_size={self.vocab_size}, rows={len(self.weight)}{options}"


def widened(rows: Tensor) -> Tensor:
    """float32, or float64 where the rows are."""
    return rows if rows.dtype == torch.float64 else rows.float()


def product_dtype(hidden: Tensor) -> torch.dtype:
    """In which dtype matrix products may be taken: autocast's, or the hidden states' own."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype

