"""One pass over held-out windows: likelihood, accuracy and the shape of the hidden states, the same for every head and batch size.

The likelihood is plain -log p(target) over the real vocabulary (padded rows have probability 0), whatever the training loss adds.
Sums are float64 and are reduced over processes before the one division, so neither batch size nor world size changes a result.
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from eval.covariance import Covariance, components_needed, effective_rank, explained_variance

# Log-probabilities held at a time, by kind of device: 64 MB of float32 (333 tokens of a 50,304-row vocabulary), 512 MB where every
# chunk's pass over the prototypes costs as much as many tokens' arithmetic.
LOG_PROBS_AT_ONCE = {"cpu": 2**24, "cuda": 2**27, "mps": 2**26}

Reduce = Callable[[torch.Tensor], object]  # sums a tensor over processes, in place
Autocast = Callable[[], contextlib.AbstractContextManager]


@dataclass
class Scores:
    """What one pass over held-out text adds up. `every` and `summary` hold hidden states of full windows only."""

    nll: float  # nats, summed over the scored positions
    correct: int  # scored positions whose most probable word is the target
    n_positions: int  # scored positions
    n_tokens: int  # tokens of the text that the windows cover
    every: Covariance  # hidden states of every scored position
    summary: Covariance  # causal: the last token of each window; masked-LM: the masked positions
    states: torch.Tensor  # (n, D) float32: the first vectors of `summary`, for pictures


def validate(model: torch.nn.Module, batches: Iterable, reduce: Reduce | None = None, autocast: Autocast = contextlib.nullcontext) -> dict:
    """Metrics of `model` (a LanguageModel) on `batches` (data.loader.Batch), as a flat dict of numbers, None where undefined.

    Draws no random number; leaves every module in the mode it was in. With `reduce`, all processes call it together, each with
    its own batches (there may be none), and all get the same result.
    """
    return metrics(score(model, batches, reduce, autocast))


def metrics(scores: Scores) -> dict:
    """The eval line's figures from the sums of a pass; units and definitions in README and in the comparison's report."""
    nll = scores.nll / scores.n_positions if scores.n_positions else None
    every, summary = scores.every.eigenvalues(), scores.summary.eigenvalues()
    return {
        "val_nll": nll,
        "val_perplexity": perplexity(nll),
        "val_accuracy": scores.correct / scores.n_positions if scores.n_positions else None,
        "effective_rank": effective_rank(every),
        "effective_rank_few": scores.every.few,
        "pca5": explained_variance(summary, 5),
        "pca90": components_needed(summary, 0.9),
        "pc2_ev": explained_variance(summary, 2),
        "pca_few": scores.summary.few,
        "pca5_every_position": explained_variance(every, 5),
        "n_positions": scores.n_positions,
        "n_tokens": scores.n_tokens,
        "n_effective_rank": scores.every.n,
        "n_pca": scores.summary.n,
    }


@torch.no_grad()
def mean_nll(
    model: torch.nn.Module, batches: Iterable, reduce: Reduce | None = None, autocast: Autocast = contextlib.nullcontext
) -> float | None:
    """Mean NLL in nats per scored position, in evaluation mode and without smoothing: validation's measure without its other metrics."""
    sums = accumulators(model, 2)
    with evaluation_mode(model):
        for batch in batches:
            with autocast():
                hidden = model.backbone(batch.tokens, positions=batch.positions)
                nll = model.head(hidden, batch.targets, reduction="none")
            sums += torch.stack([nll.to(sums).sum(), sums.new_tensor(batch.targets.numel())])
    if reduce:
        reduce(sums)
    total, count = sums.tolist()
    return total / count if count else None


@torch.no_grad()
def score(
    model: torch.nn.Module,
    batches: Iterable,
    reduce: Reduce | None = None,
    autocast: Autocast = contextlib.nullcontext,
    keep_states: int = 0,
) -> Scores:
    """Adds up one pass over `batches`; `keep_states` hidden states of this process are kept as they are."""
    sums = accumulators(model, 4)
    every, summary = (Covariance(model.head.weight.shape[1], sums.device) for _ in range(2))
    states = []
    with evaluation_mode(model):
        for batch in batches:
            with autocast():
                hidden = model.backbone(batch.tokens, positions=batch.positions)  # (B, T, D) or, masked-LM, (N, D)
                nll, correct = score_positions(model.head, hidden.flatten(0, -2), batch.targets.flatten())
            sums += torch.stack([nll, correct, sums.new_tensor(batch.targets.numel()), sums.new_tensor(batch.tokens.numel())])
            if batch.tokens.shape[1] == model.backbone.block_size:  # the short tail is scored, but is no full window
                chosen = hidden[:, -1] if batch.positions is None else hidden
                every.add(hidden)
                summary.add(chosen)
                missing = keep_states - sum(map(len, states))
                states.append(chosen[: max(missing, 0)].float().cpu())
    if reduce:
        reduce(sums)
        every.reduce(reduce)
        summary.reduce(reduce)
    total, correct, n_positions, n_tokens = sums.tolist()
    kept = torch.cat(states) if states else torch.empty(0, model.head.weight.shape[1])
    return Scores(total, round(correct), round(n_positions), round(n_tokens), every, summary, kept)


def score_positions(head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed NLL and number of right top-1 words, 0-dim float64; hidden (N, D), targets (N,). Never holds N x V."""
    chunk = max(1, LOG_PROBS_AT_ONCE.get(hidden.device.type, LOG_PROBS_AT_ONCE["cpu"]) // head.weight.shape[0])
    nll, correct = accumulators(head, 2)
    for rows, words in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        log_probs = head.log_probs(rows)  # (chunk, rows of the vocabulary)
        nll = nll - log_probs.gather(1, words[:, None]).to(nll).sum()
        correct = correct + (log_probs.argmax(dim=1) == words).to(nll).sum()
    return nll, correct


def perplexity(nll: float | None) -> float | None:
    """exp(nll), inf only when that overflows a double."""
    if nll is None:
        return None
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module):
    """Every module in evaluation mode inside, each back in its own mode outside, also after an error."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def accumulators(module: torch.nn.Module, count: int) -> torch.Tensor:
    """`count` float64 zeros beside the module's parameters (on the CPU for MPS, which has no float64)."""
    device = next(module.parameters()).device
    return torch.zeros(count, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
