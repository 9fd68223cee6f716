import itertools

import numpy as np
from scipy import stats

from data.randomness import PURPOSES, generator


def test_the_same_arguments_give_the_same_stream():
    assert np.array_equal(generator(7, "train masks", 3, 5).random(100), generator(7, "train masks", 3, 5).random(100))


def test_no_two_streams_share_a_number():
    streams = [
        generator(seed, purpose, step, row).random(200)
        for seed, purpose, step, row in itertools.product((0, 1, 2**40), PURPOSES, (0, 1, 2, 10_000), (0, 1, 2))
    ]
    assert len(np.unique(np.concatenate(streams))) == len(streams) * 200


def test_streams_are_uniform_and_neighbours_are_uncorrelated():
    rows = np.stack([generator(1, "train masks", 0, row).random(4000) for row in range(50)])
    assert stats.kstest(rows.ravel(), "uniform").pvalue > 1e-3
    correlation = np.corrcoef(rows)[np.triu_indices(50, 1)]
    assert abs(correlation).max() < 5 / np.sqrt(4000)
