"""A comparison as files: comparison.csv, comparison.json, report.md, and the table on the terminal. Every number comes from the runs."""

import csv
import io
import json
from dataclasses import asdict

from eval.comparison import Comparison, Group
from eval.radar import PSEUDO
from eval.run_metrics import METRICS
from eval.statistics import SEEDS_FOR_A_TEST, SPIKE, Difference, spikes

TERMINAL = {  # metric -> column of the terminal's table
    "val_nll": "val NLL", "val_perplexity": "perplexity", "bits_per_byte": "bits/byte", "val_accuracy": "accuracy",
    "effective_rank": "eff. rank", "pca5": "PCA5", "gradient_stability": "grad. stability", "time_to_90": "steps to 90 %",
    "gco2eq_per_1000_steps": "g/1k steps",
}  # fmt: skip
SHARES_IN_POINTS = ("pca5", "pc2_ev")  # their differences are read in percentage points
SPIKES_SHOWN = 8  # per run in the report; comparison.json has them all
ROUNDING = 1e-12  # relative spread of equal numbers
CAPTIONS = {
    "radar": "Seven axes, each normalised over the groups so that outward is better; the raw mean over seeds stands at each spoke.",
    "curves": "Training loss and validation NLL; the line is the mean over seeds and the band one standard deviation.",
    "gradient_norms": "Norm of the full gradient before clipping at every step, with the baseline's in grey behind it.",
    "hidden_states": "Validation hidden states (causal: the last token of each full window) on their first two principal components.",
    "spectrum": "Eigenvalues of the covariance of all scored hidden states, as shares of the variance.",
    "pareto": "Final validation NLL against the energy of training; the line joins the groups that no other beats in both.",
    "emissions": "Emissions of training per 1,000 steps minus the baseline's; whiskers are the 95 % bootstrap interval over seeds.",
}


def as_json(comparison: Comparison) -> dict:
    """Everything: each run's values, the groups' summaries, differences to the baseline, notes."""
    return {
        "baseline": next((f"{group.family} {group.label}" for group in comparison.groups if group.is_baseline), None),
        "warmup_included": comparison.terms.include_warmup,
        "target_nll": comparison.terms.target_nll,
        "notes": comparison.notes,
        "groups": [group_json(group) for group in comparison.groups],
    }


def group_json(group: Group) -> dict:
    metrics = {}
    for key, values in group.values.items():
        difference = group.difference(key)
        summary = asdict(group.summary(key))
        metrics[key] = summary | {"values": values, "difference": asdict(difference) if difference else None}
    return {
        "family": group.family,
        "head": group.head,
        "label": group.label,
        "options": dict(group.options),
        "learning_rate": group.learning_rate,
        "is_baseline": group.is_baseline,
        "runs": {seed: str(run.directory) for seed, run in group.runs.items()},
        "spikes": {seed: spikes(list(run.norms), list(run.norms.values())) for seed, run in group.runs.items()},
        "metrics": metrics,
    }


def as_csv(comparison: Comparison) -> str:
    """One row per group and metric; empty cells where there is no number."""
    out = io.StringIO()
    header = ["family", "group", "head", "options", "learning_rate", "metric", "unit", "better", "n", "mean", "std"]
    header += ["difference", "difference_std", "difference_n", "ci95_low", "ci95_high", "wilcoxon_p", "note"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for group in comparison.groups:
        for key in comparison.metrics():
            metric, summary, difference = METRICS[key], group.summary(key), group.difference(key)
            better = {1: "higher", -1: "lower", 0: ""}[metric.better]
            row = [group.family, group.label, group.head, json.dumps(dict(group.options)), group.learning_rate, key, metric.unit, better]
            row += [summary.n, summary.mean, summary.std]
            d = difference
            row += [d.mean, d.std, d.n, d.low, d.high, d.p, d.note] if d else [None] * 7
            writer.writerow("" if cell is None else cell for cell in row)
    return out.getvalue()


def terminal_table(comparison: Comparison) -> str:
    """The main metrics, one line per group; ± is the standard deviation over seeds."""
    keys = [key for key in TERMINAL if key in comparison.metrics()]
    masked = any(group.masked for group in comparison.groups)
    rows = [["", "n", *(TERMINAL[key].replace("perplexity", PSEUDO) if masked else TERMINAL[key] for key in keys)]]
    for group in comparison.groups:
        name = f"{group.family} {group.label}" + (" *" if group.is_baseline else "")
        rows.append([name, str(len(group.runs)), *(mean_and_spread(group, key) for key in keys)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["  ".join([row[0].ljust(widths[0]), *cells[1:]]) for row, cells in zip(rows, aligned, strict=True)]
    return "\n".join([*lines, "* baseline", *(f"note: {note}" for note in comparison.notes)])


def report(comparison: Comparison, figures: list[str]) -> str:
    """report.md: the tables, the notes, and the figures (file stems) with one sentence each."""
    baselines = [group for group in comparison.groups if group.is_baseline]
    lines = ["# Comparison of vocabulary heads", ""]
    lines += [f"Baseline: {', '.join(f'{group.family} {group.label}' for group in baselines) or 'none'}.", ""]
    lines += [
        f"Values are those after the last update, on {'all of val' if comparison.terms.whole else 'what training evaluates of val'} "
        "(`best val NLL` is the lowest of a run's own evaluations), "
        "as mean ± standard deviation over seeds. Differences are paired by seed, with a 95 % bootstrap interval; "
        "p is a two-sided Wilcoxon signed-rank test, "
        f"which takes {SEEDS_FOR_A_TEST} seeds. Gradient stability is 1 − variance / baseline variance of the gradient norm "
        f"{'over all steps' if comparison.terms.include_warmup else 'after the warm-up'}; "
        f"a spike is a norm above {SPIKE:g} running medians.",
        "",
    ]
    if comparison.notes:
        lines += ["Notes", "", *(f"- {note}" for note in comparison.notes), ""]
    for family, groups in comparison.families.items():
        lines += [f"## {family}", "", *overview(comparison, groups), ""]
        lines += picture(figures, f"radar_{family}") + picture(figures, f"curves_{family}")
        lines += [f"### Differences to the baseline: {family}", "", *differences(comparison, groups), ""]
        for kind in ("gradient_norms", "pareto", "hidden_states", "spectrum"):
            lines += picture(figures, f"{kind}_{family}")
    if "emissions" in figures:
        lines += ["## Emissions", "", *picture(figures, "emissions")]
    return "\n".join(lines + runs_table(comparison)) + "\n"


def overview(comparison: Comparison, groups: list[Group]) -> list[str]:
    """Metrics down, groups across."""
    head = ["metric", *(group.label + (" (baseline)" if group.is_baseline else "") for group in groups)]
    rows = [[with_unit(key, groups[0].masked), *(mean_and_spread(group, key) for group in groups)] for key in comparison.metrics()]
    rows.insert(0, ["seeds", *(str(len(group.runs)) for group in groups)])
    rows.insert(1, ["learning rate", *(f"{group.learning_rate:g}" for group in groups)])
    return markdown(head, rows)


def differences(comparison: Comparison, groups: list[Group]) -> list[str]:
    rows = []
    for group in groups:
        for key in comparison.metrics():
            difference = group.difference(key)
            if difference and difference.mean is not None and key not in ("gradient_stability", "speed"):  # are differences already
                rows.append([group.label, named(key, group.masked), *difference_cells(key, difference)])
    if not rows:
        return ["There is no group to compare with a baseline."]
    return markdown(["group", "metric", "difference", "95 % interval", "n", "p"], rows)


def difference_cells(key: str, difference: Difference) -> list[str]:
    form, factor, unit = METRICS[key].format, 1, ""
    if key in SHARES_IN_POINTS:
        form, factor, unit = ".2f", 100, " points"
    numbers = (difference.mean, difference.low, difference.high)
    mean, low, high = (None if value is None else format(factor * value, form) for value in numbers)
    sign = "+" if difference.mean > 0 else ""
    interval = f"{low} to {high}" if low is not None else "–"
    return [f"{sign}{mean}{unit}", interval, str(difference.n), f"{difference.p:.4f}" if difference.p is not None else difference.note]


def runs_table(comparison: Comparison) -> list[str]:
    rows = []
    for group in comparison.groups:
        for seed, run in group.runs.items():
            end = run.about.get("exit_reason") or "unknown"
            found = spikes(list(run.norms), list(run.norms.values()))
            more = f" and {len(found) - SPIKES_SHOWN} more" if len(found) > SPIKES_SHOWN else ""
            steps = ", ".join(map(str, found[:SPIKES_SHOWN])) + more
            rows.append([group.family, group.label, str(seed), f"`{run.directory}`", end, steps or "none"])
    return ["## Runs", "", *markdown(["family", "group", "seed", "folder", "ended", "gradient spikes at step"], rows)]


def picture(figures: list[str], name: str) -> list[str]:
    if name not in figures:
        return []
    kind = next(kind for kind in CAPTIONS if name.startswith(kind))
    return [f"![{name.replace('_', ' ')}]({name}.png)", "", CAPTIONS[kind] + f" ([SVG]({name}.svg))", ""]


def mean_and_spread(group: Group, key: str) -> str:
    """`mean ± std`, `mean (n = 1)`-style where a seed is missing, a dash where there is nothing."""
    summary, form = group.summary(key), METRICS[key].format
    if summary.mean is None:
        return "–"
    spread = 0.0 if summary.std is not None and summary.std < ROUNDING * abs(summary.mean) else summary.std
    text = format(summary.mean, form) + (f" ± {spread:.2g}" if spread is not None else "")
    return text + (f" (n = {summary.n})" if summary.n != len(group.runs) else "")


def with_unit(key: str, masked: bool) -> str:
    unit = METRICS[key].unit
    return named(key, masked) + (f" ({unit})" if unit else "")


def named(key: str, masked: bool) -> str:
    """The metric's name; a masked-LM run has no perplexity of a language model."""
    return METRICS[key].label.replace("perplexity", PSEUDO) if masked else METRICS[key].label


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    table = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
