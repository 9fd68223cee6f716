import itertools
import math

import numpy as np
import pytest

from eval.statistics import (
    clipped_share,
    coefficient_of_variation,
    gradient_stability,
    paired_difference,
    spent_until,
    spikes,
    summarize,
    time_to_share,
)


def by_step(norms, first=1):
    return dict(enumerate(norms, first))


NORMS = np.random.default_rng(0).uniform(0.5, 2, 60)


def test_gradient_stability_of_a_run_against_itself_is_zero():
    result = gradient_stability(by_step(NORMS), by_step(NORMS))
    assert result.value == 0
    assert result.variance == result.baseline_variance == pytest.approx(np.var(NORMS), rel=1e-12)
    assert result.n == 60


def test_constant_norms_are_perfectly_steady_and_wilder_ones_negative():
    assert gradient_stability(by_step([1.0] * 60), by_step(NORMS)).value == 1
    assert gradient_stability(by_step(2 * NORMS), by_step(NORMS)).value == pytest.approx(-3, rel=1e-12)


def test_gradient_stability_takes_the_shared_steps_after_the_warm_up():
    run, baseline = by_step(NORMS), by_step(NORMS[10:], first=11)
    run[3] = 1e6  # a warm-up step
    result = gradient_stability(run, baseline | {2: 1e9}, after=20)
    assert result.n == 40 and result.value == 0


def test_gradient_stability_without_a_usable_baseline_is_absent():
    assert gradient_stability(by_step(NORMS), {}).value is None
    assert gradient_stability(by_step(NORMS), by_step([1.0] * 60)).value is None
    skipping = gradient_stability(by_step([math.inf, *NORMS[1:]]), by_step(NORMS))
    assert skipping.value == 0 and skipping.skipped == 1


def test_coefficient_of_variation_has_no_scale():
    assert coefficient_of_variation(NORMS) == pytest.approx(np.std(NORMS) / np.mean(NORMS))
    assert coefficient_of_variation(1000 * NORMS) == pytest.approx(coefficient_of_variation(NORMS))
    assert coefficient_of_variation([2.0, math.inf, math.nan]) is None


def test_clipped_share():
    assert clipped_share([0.5, 1.0, 1.5, math.inf], 1.0) == 0.5
    assert clipped_share([0.5], 0) is clipped_share([], 1.0) is None


def test_spikes_are_told_from_the_running_median():
    norms = [1.0] * 30
    norms[20], norms[25], norms[3] = 10.5, 9.5, 99.0  # step 3 has too short a past
    assert spikes(range(100, 130), norms) == [120]
    drift = np.geomspace(1, 1000, 500)  # growth is no spike
    assert spikes(range(500), drift) == []
    assert spikes(range(20), [1.0] * 15 + [math.inf] + [1.0] * 4) == [15]


def test_time_to_ninety_percent_of_the_improvement():
    steps, losses = [0, 100, 200, 300, 400], [10.0, 6.0, 2.5, 2.0, 1.0]  # 10 - 0.9 * 9 = 1.9
    assert time_to_share(steps, losses) == 400
    assert time_to_share(steps, [10.0, 6.0, 1.9, 2.0, 1.0]) == 200
    assert time_to_share(steps, [10.0, math.nan, 1.9, math.nan, 1.0]) == 200


@pytest.mark.parametrize("losses", [[], [math.nan, 3.0], [math.inf, 3.0], [3.0], [3.0, 3.0], [3.0, 4.0]])
def test_a_run_that_does_not_improve_has_no_time(losses):
    assert time_to_share(range(len(losses)), losses) is None


def test_energy_until_a_loss_is_linear_between_evaluations():
    losses, energy = [10.0, 6.0, 4.0], [0.0, 2.0, 3.0]
    assert spent_until(losses, energy, 8.0) == pytest.approx(1.0)
    assert spent_until(losses, energy, 5.0) == pytest.approx(2.5)
    assert spent_until(losses, energy, 6.0) == 2.0
    assert spent_until(losses, energy, 11.0) == 0.0
    assert spent_until(losses, energy, 3.9) is None
    assert spent_until([10.0, math.nan, 4.0], energy, 8.0) is None
    assert spent_until([], [], 1.0) is None


def test_summary_over_seeds():
    summary = summarize([1.0, None, 3.0])
    assert (summary.mean, summary.std, summary.n) == (2.0, pytest.approx(math.sqrt(2)), 2)
    assert summarize([None]).mean is None and summarize([4.0]).std is None
    assert summarize([4.0, math.inf]).mean == math.inf


def test_wilcoxon_is_exact_over_all_signs():
    differences = np.array([0.3, -0.1, 0.5, 0.7, 0.2, 0.9, 0.4])
    ranks = np.argsort(np.argsort(np.abs(differences))) + 1
    statistic = min(ranks[differences > 0].sum(), ranks[differences < 0].sum())
    sums = [sum(rank for rank, up in zip(ranks, signs, strict=True) if up) for signs in itertools.product([0, 1], repeat=7)]
    expected = 2 * np.mean([total <= statistic for total in sums])
    result = paired_difference(list(differences + 5), [5.0] * 7)
    assert result.p == pytest.approx(expected, rel=1e-9)
    assert result.n == 7 and result.note == ""
    assert result.mean == pytest.approx(differences.mean())
    standard_error = differences.std(ddof=1) / math.sqrt(7)
    assert differences.min() < result.low < result.mean < result.high < differences.max()
    assert result.high - result.low == pytest.approx(2 * 1.96 * standard_error, rel=0.25)


def test_few_seeds_are_said_to_be_few():
    result = paired_difference([1.0, 2.0, 4.0], [1.5, 1.0, 3.5])
    assert result.p is None and result.note == "too few seeds for a test"
    assert -0.5 <= result.low <= result.mean <= result.high <= 1.0
    assert paired_difference([1.0], [2.0]).mean == -1 and "one seed" in paired_difference([1.0], [2.0]).note
    assert paired_difference([None, math.nan], [1.0, 1.0]).n == 0


def test_equal_runs_differ_by_nothing():
    result = paired_difference([1.0] * 8, [1.0] * 8)
    assert (result.mean, result.low, result.high, result.p) == (0, 0, 0, 1)


def test_the_interval_is_the_same_each_time():
    values, zeros = [0.1, 0.4, -0.2, 0.9], [0.0] * 4
    assert paired_difference(values, zeros) == paired_difference(values, zeros)
