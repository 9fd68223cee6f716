"""The geometry of a head's prototypes: how long they are, how close together, how far they have moved, which are neighbours.

Distances are the head's own. Pairs are taken from 1,024 fixed prototypes against all, so that it costs seconds at any vocabulary.
A head with a finite minimiser shows norms and drift that settle; a linear head's weights may grow without bound.
"""

import torch
from torch import Tensor, nn

SAMPLE = 1024
DISTANCES_AT_ONCE = 2**24  # 64 MB of float32
QUANTILES = (0, 5, 25, 50, 75, 95, 100)  # percent
MOVED = 0.01  # of a prototype's own length


class PrototypeGeometry:
    """Measures a head at each evaluation; keeps a copy of the prototypes (in main memory) to tell how far they have moved since."""

    def __init__(self):
        self.before: Tensor | None = None  # (V, D) float32

    @torch.no_grad()
    def measure(self, head: nn.Module) -> dict:
        """Figures of `head` now. Drift is None at the first call; distances are None for a head that has none (the linear one)."""
        words = head.weight[: head.vocab_size].detach().float()  # (V, D): without the padded rows
        norms = words.norm(dim=1)
        quantiles = torch.quantile(norms, torch.tensor(QUANTILES, device=norms.device) / 100).tolist()
        nearest = nearest_distances(head, fixed_sample(head.vocab_size).to(norms.device))
        before, now = self.before, self.remember(head)
        moved_less = None
        if before is not None:
            moved_less = ((now - before).norm(dim=1) < MOVED * before.norm(dim=1)).float().mean().item()
        return {
            "norm_mean": norms.mean().item(),
            "norm_quantiles": dict(zip(map(str, QUANTILES), quantiles, strict=True)),
            "nearest_distance_mean": None if nearest is None else nearest.mean().item(),
            "moved_less_share": moved_less,
            "sample": min(SAMPLE, head.vocab_size),
        }

    def remember(self, head: nn.Module) -> Tensor:
        """Takes the prototypes as they are for those of the last evaluation; returns the copy."""
        self.before = head.weight[: head.vocab_size].detach().float().cpu().clone()
        return self.before


def fixed_sample(vocab_size: int) -> Tensor:
    """Up to 1,024 word ids, evenly spread over the vocabulary; the same in every evaluation and for every head."""
    return torch.linspace(0, vocab_size - 1, min(SAMPLE, vocab_size), dtype=torch.float64).round().long()


@torch.no_grad()
def nearest_distances(head: nn.Module, ids: Tensor) -> Tensor | None:
    """Distance of each prototype `ids` (n,) to the nearest other word's, (n,); None for a head without distances."""
    if not has_distances(head):
        return None
    return torch.cat([rows.min(dim=1).values for rows in distances_between(head, ids)])


@torch.no_grad()
def nearest_words(head: nn.Module, word: int, count: int = 10) -> list[tuple[int, float]]:
    """The `count` words nearest to `word`, as (id, distance) in the head's own metric, nearest first.

    For a linear head: (id, inner product), largest first.
    """
    ids = torch.tensor([word], device=head.weight.device)
    linear = not has_distances(head)
    if linear:
        row = head.weight[: head.vocab_size].float() @ head.weight[word].float()
        row[word] = -torch.inf
    else:
        (row,) = next(iter(distances_between(head, ids)))
    values, words = row.topk(min(count, len(row) - 1), largest=linear)
    return list(zip(words.tolist(), values.tolist(), strict=True))


def distances_between(head: nn.Module, ids: Tensor):
    """Yields the distances of prototypes `ids` to all words in chunks (n, V); infinite to the word itself."""
    for chunk in ids.split(max(1, DISTANCES_AT_ONCE // head.weight.shape[0])):
        rows = head.distances(as_hidden(head, chunk))[:, : head.vocab_size].float()
        yield rows.scatter(1, chunk[:, None], torch.inf)


def as_hidden(head: nn.Module, ids: Tensor) -> Tensor:
    """The hidden states (n, D) that lie exactly on the prototypes `ids`."""
    return head.weight[ids].float() / getattr(head, "scale", 1.0)  # hidden states are multiplied by it


def has_distances(head: nn.Module) -> bool:
    return hasattr(head, "distances")
