"""One random stream per purpose: every draw is a function of (seed, purpose, step, row), so nothing has to be stored or replayed."""

import numpy as np

PURPOSES = {"train windows": 1, "train masks": 2, "validation masks": 3}


def generator(seed: int, purpose: str, step: int, row: int = 0) -> np.random.Generator:
    """A generator of its own for each (seed, purpose, step, row).

    Philox is counter-based: seed and purpose are its key, step and row the upper words of its 256-bit counter, and the
    lowest word counts the draws, so that streams never meet (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
    """
    return np.random.Generator(np.random.Philox(key=[seed, PURPOSES[purpose]], counter=[0, row, step, 0]))
