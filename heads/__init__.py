"""Vocabulary heads: harmonic and Gibbs links on nine distances, and the linear baseline, behind one interface."""

from heads.distances.bray_curtis import BrayCurtis
from heads.distances.canberra import Canberra
from heads.distances.chebyshev import Chebyshev
from heads.distances.cosine import Cosine
from heads.distances.euclidean import Euclidean
from heads.distances.hamming import Hamming
from heads.distances.mahalanobis import Mahalanobis
from heads.distances.manhattan import Manhattan
from heads.distances.minkowski import Minkowski
from heads.head import Head
from heads.linear import Linear

HEADS = {
    "linear": Linear,
    "euclidean": Euclidean,
    "manhattan": Manhattan,
    "chebyshev": Chebyshev,
    "minkowski": Minkowski,
    "cosine": Cosine,
    "hamming": Hamming,
    "canberra": Canberra,
    "bray_curtis": BrayCurtis,
    "mahalanobis": Mahalanobis,
}


def build_head(name: str, n_embd: int, vocab_size: int, padded_vocab_size: int | None = None, **options) -> Head:
    """The head called `name` with prototypes (padded_vocab_size or vocab_size, n_embd); options that are None are unset.

    Raises ValueError for an unknown name or option, listing what exists, and for values out of range, naming the argument.
    """
    if name not in HEADS:
        raise ValueError(f"unknown head {name!r}: there are {', '.join(HEADS)}")
    return HEADS[name](n_embd, vocab_size, padded_vocab_size, **options)
