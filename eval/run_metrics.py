"""Every figure a comparison shows: its name, unit and direction, and how it is taken from one run's files. None where there is nothing."""

import math
from dataclasses import dataclass

import numpy as np

from eval.run_folder import RunFolder
from eval.statistics import clipped_share, coefficient_of_variation, gradient_stability, spent_until, spikes, time_to_share
from training.emissions import totals


@dataclass(frozen=True)
class Metric:
    """`better` is 1 (higher), -1 (lower) or 0 (neither); `counted_by` names the eval line's count of vectors behind the figure."""

    label: str
    unit: str
    better: int
    format: str = ".4g"
    counted_by: str | None = None


METRICS = {
    "val_nll": Metric("val NLL", "nats/token", -1, ".4f"),
    "val_perplexity": Metric("val perplexity", "", -1),
    "best_val_nll": Metric("best val NLL", "nats/token", -1, ".4f"),
    "bits_per_byte": Metric("bits per byte", "", -1, ".4f"),
    "val_accuracy": Metric("val accuracy", "share of positions", 1, ".4f"),
    "train_nll": Metric("train NLL", "nats/token", -1, ".4f"),
    "train_perplexity": Metric("train perplexity", "", -1),
    "effective_rank": Metric("effective rank", "", 1, counted_by="n_effective_rank"),
    "pca5": Metric("PCA5", "share of variance", 1, ".4f", counted_by="n_pca"),
    "pca90": Metric("PCA@90", "components", -1, counted_by="n_pca"),
    "pc2_ev": Metric("PC2 EV", "share of variance", 1, ".4f", counted_by="n_pca"),
    "gradient_stability": Metric("gradient stability", "", 1),
    "gradient_variance": Metric("variance of the gradient norm", "", -1),
    "gradient_cv": Metric("gradient norm: std / mean", "", -1, ".3f"),
    "clipped_share": Metric("clipped steps", "share of steps", 0, ".4f"),
    "spikes": Metric("gradient spikes", "steps", -1),
    "time_to_90": Metric("time to 90 %", "steps", -1),
    "speed": Metric("speed: steps ahead of the baseline", "steps", 1),
    "tokens_per_s": Metric("throughput", "tokens/s", 1, ",.0f"),
    "step_ms": Metric("step", "ms", -1),
    "mfu": Metric("model FLOPs utilisation", "share of the peak", 1, ".3f"),
    "memory_mb": Metric("peak memory", "MB", -1, ",.0f"),
    "gco2eq_per_1000_steps": Metric("emissions of training", "gCO2eq per 1,000 steps", -1),
    "kwh_per_1000_steps": Metric("energy of training", "kWh per 1,000 steps", -1),
    "gco2eq_train": Metric("emissions of training, whole run", "gCO2eq", -1),
    "kwh_train": Metric("energy of training, whole run", "kWh", -1),
    "kwh_eval": Metric("energy of evaluation", "kWh", -1),
    "kwh_checkpoint": Metric("energy of checkpoints", "kWh", -1),
    "kwh_lost": Metric("energy of steps that a crash undid", "kWh, counted above", -1),
    "gco2eq_to_target": Metric("emissions until the target loss", "gCO2eq", -1),
    "kwh_to_target": Metric("energy until the target loss", "kWh", -1),
    "prototype_norm": Metric("median prototype norm", "", 0),
    "prototype_growth": Metric("median prototype norm, end / start", "", 0, ".3f"),
    "nearest_distance": Metric("mean distance to the nearest prototype", "in the head's own metric", 0),
    "moved_less_share": Metric("prototypes that moved by less than 1 %", "share of words", 0, ".3f"),
}
FROM_RESULTS = ("train_nll", "val_nll", "val_perplexity", "bits_per_byte", "val_accuracy", "effective_rank", "pca5", "pca90", "pc2_ev")


@dataclass(frozen=True)
class Terms:
    """How runs are measured: gradients after the warm-up or over all steps, energy until `target_nll` or the baseline's final NLL."""

    include_warmup: bool = False
    target_nll: float | None = None
    whole: bool = False  # final figures are those of `eval.evaluate` on all of val: `compare` decides, so that all runs' are of one kind


def measure(run: RunFolder, baseline: RunFolder | None, terms: Terms) -> dict[str, float | None]:
    """All of METRICS for one run; `baseline` is the baseline's run of the same seed, without which pairwise figures are None."""
    values = dict.fromkeys(METRICS)
    values |= {key: number(run.results(terms.whole).get(key)) for key in FROM_RESULTS}
    values["train_perplexity"] = exponential(values["train_nll"])
    finite = [line["val_nll"] for line in run.metrics.eval if math.isfinite(number(line.get("val_nll"), math.nan))]
    values["best_val_nll"] = min(finite, default=None)
    values |= gradients(run, baseline, terms) | speed(run, baseline) | energy(run, baseline, terms) | prototypes(run)
    return values


def gradients(run: RunFolder, baseline: RunFolder | None, terms: Terms) -> dict:
    after = 0 if terms.include_warmup else run.config["schedule"].get("warmup_steps", 0)
    steps = [step for step in run.norms if step > after]
    norms = [run.norms[step] for step in steps]
    values = {
        "gradient_variance": gradient_stability(run.norms, run.norms, after).variance,
        "gradient_cv": coefficient_of_variation(norms),
        "clipped_share": clipped_share(norms, run.config["train"].get("grad_clip", 0)),
        "spikes": len(spikes(list(run.norms), list(run.norms.values()))) if run.norms else None,
    }
    if baseline and run.learning_rate == baseline.learning_rate:  # the variance of a norm depends on the learning rate
        values["gradient_stability"] = gradient_stability(run.norms, baseline.norms, after).value
    return values


def speed(run: RunFolder, baseline: RunFolder | None) -> dict:
    time, reference = (time_to_90(one) if one else None for one in (run, baseline))
    ahead = reference - time if time is not None and reference is not None else None
    medians = {key: middle(run.metrics.column(key)) for key in ("tokens_per_s", "step_ms", "mfu")}
    memory = run.metrics.column("memory_mb")
    peak = float(np.nanmax(memory)) if np.isfinite(memory).any() else None
    return {"time_to_90": time, "speed": ahead, "memory_mb": peak} | medians


def time_to_90(run: RunFolder) -> int | None:
    return time_to_share([line["step"] for line in run.metrics.eval], run.metrics.column("val_nll", "eval"))


def energy(run: RunFolder, baseline: RunFolder | None, terms: Terms) -> dict:
    training = run.spent_on("training")
    steps = sum(row["last_step"] - row["first_step"] + 1 for row in training if row.get("node", 0) == 0 and row.get("steps") != 0)
    scopes = {"train": "training", "eval": "evaluation", "checkpoint": "checkpoint"}
    values = {f"kwh_{name}": spent(run.spent_on(scope), "kwh") for name, scope in scopes.items()}
    values["gco2eq_train"] = spent(training, "gco2eq")
    if training and "lost_steps" in training[0]:
        values["kwh_lost"] = totals(run.emissions)["lost"]["kwh"]
    target = terms.target_nll
    if target is None and baseline:
        target = number(baseline.final.get("val_nll"))
    evaluated = [line["step"] for line in run.metrics.eval]
    for key in ("kwh", "gco2eq"):
        whole = values[f"{key}_train"]
        values[f"{key}_per_1000_steps"] = 1000 * whole / steps if whole is not None and steps else None
        if target is not None:
            values[f"{key}_to_target"] = spent_until(run.metrics.column("val_nll", "eval"), run.energy_at(key, evaluated), target)
    return values


def spent(rows: list[dict], key: str) -> float | None:
    """Sum over intervals; None if there are none or one of them was not measured (which is not zero)."""
    amounts = [number(row.get(key)) for row in rows]
    return sum(amounts) if amounts and None not in amounts else None


def prototypes(run: RunFolder) -> dict:
    last, first = run.final.get("prototypes") or {}, {}
    if run.metrics.eval and run.metrics.eval[0]["step"] == 0:
        first = run.metrics.eval[0].get("prototypes") or {}
    norm, start = (number((geometry.get("norm_quantiles") or {}).get("50")) for geometry in (last, first))
    return {
        "prototype_norm": norm,
        "prototype_growth": norm / start if norm is not None and start else None,
        "nearest_distance": number(last.get("nearest_distance_mean")),
        "moved_less_share": number(last.get("moved_less_share")),
    }


def number(value: object, otherwise: float | None = None) -> float | None:
    """`value` if it is a number, non-finite included."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise


def middle(values: np.ndarray) -> float | None:
    """Median of the values there are: compilation and the first steps' warming up do not count as throughput."""
    return float(np.nanmedian(values)) if np.isfinite(values).any() else None


def exponential(nll: float | None) -> float | None:
    """Perplexity of an NLL; inf where it overflows."""
    with np.errstate(over="ignore"):
        return None if nll is None else float(np.exp(np.float64(nll)))
