"""SciPy or NumPy in float64, as far as possible from the code under test."""

import torch

from heads import build_head
from tests.heads.harness import batch


def distances_of(head, hidden):
    """What the head says, for as many words as it has: float64."""
    return head.distances(hidden)[:, : head.vocab_size].double()


def problem(tokens=17, words=31, width=9, seed=1):
    """Hidden states (tokens, width) and prototypes (words, width), of both signs."""
    return batch(tokens, 2, width, seed)[0], batch(words, 2, width, seed + 50)[0]


def head_with(prototypes, name, **options):
    head = build_head(name, prototypes.shape[1], len(prototypes), **options).eval()
    with torch.no_grad():
        head.weight.copy_(prototypes)
    return head


def assert_distances(head, hidden, expected, rtol=1e-5, atol=1e-7):
    """The kernel path in float32 and float64, and the plain definition, against `expected` (an array)."""
    expected = torch.from_numpy(expected)
    torch.testing.assert_close(distances_of(head, hidden), expected, rtol=rtol, atol=atol)
    head = head.double()
    torch.testing.assert_close(distances_of(head, hidden.double()), expected, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(head.definition(hidden.double(), head.weight), expected, rtol=1e-9, atol=1e-11)
