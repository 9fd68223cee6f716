import math

import numpy as np

from eval.radar import INNERMOST, normalise


def test_outward_is_better():
    assert normalise([10.0, 20.0, 15.0], better=-1) == [1.0, INNERMOST, (1 + INNERMOST) / 2]
    assert normalise([10.0, 20.0], better=1) == [INNERMOST, 1.0]


def test_equal_values_are_all_best_and_absent_ones_have_no_place():
    radii = normalise([3.0, None, 3.0], better=1)
    assert radii[0] == radii[2] == 1 and math.isnan(radii[1])


def test_infinite_is_the_worst():
    np.testing.assert_allclose(normalise([math.inf, 1.0, 2.0], better=-1), [INNERMOST, 1.0, INNERMOST])
