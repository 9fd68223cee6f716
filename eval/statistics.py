"""What a run's curves say, and how sure a comparison of several seeds can be. Pure functions of arrays; scipy does the statistics.

Undefined is None, never 0: a run without the numbers that a figure needs has no such figure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

SPIKE = 10.0  # a norm of this many running medians is a spike
SPIKE_WINDOW = 100  # steps before a step that its running median is taken over
SPIKE_HISTORY = 10  # fewer steps than this before a step: no median to compare with
SEEDS_FOR_A_TEST = 6  # the smallest two-sided p of a signed-rank test over n pairs is 2^(1-n): below six it cannot reach 0.05
RESAMPLES = 9999


@dataclass(frozen=True)
class GradientStability:
    """1 - variance / baseline_variance over `n` steps; `skipped` steps had a non-finite norm in one of the two runs."""

    value: float | None
    variance: float | None
    baseline_variance: float | None
    n: int
    skipped: int


def gradient_stability(norms: dict[int, float], baseline: dict[int, float], after: int = 0) -> GradientStability:
    """Gradient stability of a run against its baseline over the steps > `after` that both have.

    `norms`: step -> norm of the full gradient before clipping. 1 is perfectly steady, 0 equals the baseline, negative is worse.
    """
    shared = [step for step in norms if step in baseline and step > after]
    pairs = np.array([(norms[step], baseline[step]) for step in shared], dtype=np.float64).reshape(-1, 2)
    finite = pairs[np.isfinite(pairs).all(axis=1)]
    skipped = len(pairs) - len(finite)
    if len(finite) < 2:
        return GradientStability(None, None, None, len(finite), skipped)
    variance, baseline_variance = (float(value) for value in finite.var(axis=0))
    value = 1 - variance / baseline_variance if baseline_variance > 0 else None
    return GradientStability(value, variance, baseline_variance, len(finite), skipped)


def coefficient_of_variation(norms: Sequence[float]) -> float | None:
    """Standard deviation over mean of the finite norms: steadiness without a scale and without a baseline."""
    finite = finite_values(norms)
    return float(finite.std() / finite.mean()) if len(finite) > 1 and finite.mean() > 0 else None


def clipped_share(norms: Sequence[float], grad_clip: float) -> float | None:
    """Share of the steps whose gradient was longer than `grad_clip`; None where clipping is off or there are no steps."""
    norms = np.asarray(norms, dtype=np.float64)
    norms = norms[~np.isnan(norms)]
    return float((norms > grad_clip).mean()) if grad_clip > 0 and len(norms) else None


def spikes(steps: Sequence[int], norms: Sequence[float]) -> list[int]:
    """The steps whose norm exceeds 10 running medians (over the 100 steps before), or is infinite."""
    norms = np.asarray(norms, dtype=np.float64)
    found = []
    for index in range(SPIKE_HISTORY, len(norms)):
        before = norms[max(0, index - SPIKE_WINDOW) : index]
        if norms[index] > SPIKE * np.nanmedian(before):
            found.append(int(steps[index]))
    return found


def time_to_share(steps: Sequence[int], losses: Sequence[float], share: float = 0.9) -> int | None:
    """First evaluated step whose loss has covered `share` of the run's own improvement: L0 - share * (L0 - L_best)."""
    steps, losses = np.asarray(steps), np.asarray(losses, dtype=np.float64)
    if not len(losses) or not np.isfinite(losses[0]):
        return None
    best = np.nanmin(losses)
    if not best < losses[0]:
        return None
    with np.errstate(invalid="ignore"):  # NaN <= x is False, which is what is meant
        return int(steps[np.argmax(losses <= losses[0] - share * (losses[0] - best))])


def spent_until(losses: Sequence[float], spent: Sequence[float], target: float) -> float | None:
    """What had been spent (energy, emissions, steps) when the loss first reached `target`, linear between evaluations.

    `spent` is cumulative, one value per evaluation. None where the target is never reached, or a NaN lies on the way there.
    """
    losses, spent = np.asarray(losses, dtype=np.float64), np.asarray(spent, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        reached = np.flatnonzero(losses <= target)
    if not len(reached):
        return None
    k = reached[0]
    if k == 0 or losses[k] == target:
        value = spent[k]
    else:
        fraction = (losses[k - 1] - target) / (losses[k - 1] - losses[k])
        value = spent[k - 1] + fraction * (spent[k] - spent[k - 1])
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n - 1) and number of the values that exist, over seeds."""

    mean: float | None
    std: float | None
    n: int


def summarize(values: Sequence[float | None]) -> Summary:
    present = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(present):
        return Summary(None, None, 0)
    spread = float(present.std(ddof=1)) if len(present) > 1 and np.isfinite(present).all() else None
    return Summary(float(present.mean()), spread, len(present))


@dataclass(frozen=True)
class Difference:
    """Run minus baseline over paired seeds: mean, standard deviation, 95 % bootstrap interval, Wilcoxon signed-rank p."""

    mean: float | None
    std: float | None
    n: int
    low: float | None
    high: float | None
    p: float | None
    note: str


def paired_difference(values: Sequence[float | None], baseline: Sequence[float | None]) -> Difference:
    """Compares two lists paired by seed. Pairs with a value missing or not finite count for nothing; n says what is left."""
    pairs = [(a, b) for a, b in zip(values, baseline, strict=True) if a is not None and b is not None]
    differences = np.array([a - b for a, b in pairs if math.isfinite(a) and math.isfinite(b)], dtype=np.float64)
    n = len(differences)
    if n == 0:
        return Difference(None, None, 0, None, None, None, "no pair of seeds")
    mean = float(differences.mean())
    if n == 1:
        return Difference(mean, None, 1, None, None, None, "one seed: no spread, no test")
    low = high = mean
    if np.ptp(differences) > 0:
        sample = stats.bootstrap((differences,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0))
        low, high = (float(bound) for bound in sample.confidence_interval)
    p, note = None, "too few seeds for a test"
    if n >= SEEDS_FOR_A_TEST:
        p, note = (float(stats.wilcoxon(differences).pvalue) if differences.any() else 1.0), ""
    return Difference(mean, float(differences.std(ddof=1)), n, low, high, p, note)


def finite_values(values: Sequence[float]) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    return values[np.isfinite(values)]
