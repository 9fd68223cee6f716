"""The pictures of a comparison, drawn without a display: one function per figure, None where the files hold nothing to draw.

Colours tell groups apart for colour-blind readers too (Paul Tol's "muted" scheme), and never alone: each group also has its own
marker and line. The baseline is black. Numbers are means over seeds, bands one standard deviation.
"""

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.comparison import Comparison, Group
from eval.radar import radar
from eval.run_folder import RunFolder

COLOURS = ("#332288", "#CC6677", "#117733", "#88CCEE", "#882255", "#999933", "#44AA99", "#AA4499", "#DDCC77")
MARKERS = {"s": "■", "^": "▲", "o": "●", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★"}  # for plots -> the same as a letter
LINES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 2, 1, 2)))
STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
    "svg.hashsalt": "comparison", "svg.fonttype": "none", "lines.linewidth": 1.6,
}  # fmt: skip
CURVE_POINTS = 200  # of a training curve: more are narrower than a pixel
TITLE_WIDTH = 28  # characters over a panel of a grid
GREY = "#888888"


@dataclass(frozen=True)
class Look:
    colour: str
    marker: str
    line: object

    @property
    def glyph(self) -> str:
        return MARKERS[self.marker]


def looks(comparison: Comparison) -> dict[str, Look]:
    """Label -> look, the same for a head in every family and figure."""
    labels = list(dict.fromkeys(group.label for group in comparison.groups))
    baselines = {group.label for group in comparison.groups if group.is_baseline}
    markers, chosen, index = list(MARKERS), {}, 0
    for label in labels:
        if label in baselines:
            chosen[label] = Look("black", "o", "-")
        else:
            others = [marker for marker in markers if marker != "o"]
            chosen[label] = Look(COLOURS[index % len(COLOURS)], others[index % len(others)], LINES[(index + 1) % len(LINES)])
            index += 1
    return chosen


def draw_all(comparison: Comparison) -> dict[str, Figure]:
    """Name -> figure, for every figure that the runs have numbers for."""
    figures: dict[str, Figure | None] = {}
    with matplotlib.rc_context(STYLE):
        look = looks(comparison)
        for family, groups in comparison.families.items():
            figures[f"radar_{family}"] = radar(groups, look)
            figures[f"curves_{family}"] = curves(groups, look)
            figures[f"gradient_norms_{family}"] = gradient_norms(groups, look)
            figures[f"hidden_states_{family}"] = hidden_states(groups, look)
            figures[f"spectrum_{family}"] = spectrum(groups, look)
            figures[f"pareto_{family}"] = pareto(groups, look)
        figures["emissions"] = emission_differences(comparison, look)
    return {name: figure for name, figure in figures.items() if figure is not None}


def save(figure: Figure, out_dir: Path, name: str) -> None:
    """Writes NAME.png and NAME.svg; the same figure gives the same bytes."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(out_dir / f"{name}.png", dpi=200, bbox_inches="tight", metadata={"Software": None})
        figure.savefig(out_dir / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})


def curves(groups: list[Group], look: dict[str, Look]) -> Figure | None:
    """Training loss and validation NLL over steps, mean and seed band."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    drawn = 0
    for panel, kind, key in zip(panels, ("train", "eval"), ("loss", "val_nll"), strict=True):
        for group in groups:
            steps, mean, spread = over_seeds(group.runs.values(), kind, key)
            if len(steps):
                style = look[group.label]
                marks = {"marker": style.marker, "markersize": 5} if kind == "eval" else {}
                panel.plot(steps, mean, color=style.colour, linestyle=style.line, label=group.label, **marks)
                panel.fill_between(steps, mean - spread, mean + spread, color=style.colour, alpha=0.15, linewidth=0)
                drawn += 1
        panel.set_xlabel("step")
        panel.set_ylabel("nats/token")
    panels[0].set_title("training loss")
    panels[1].set_title("validation NLL")
    if not drawn:
        return None
    legend(figure, groups, look)
    return figure


def over_seeds(runs: Iterable[RunFolder], kind: str, key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps that every run with such lines has, mean and standard deviation (0 for one seed); training curves in blocks of steps."""
    series = []
    for run in runs:
        values = run.metrics.column(key, kind)
        steps = [line["step"] for line in getattr(run.metrics, kind)]
        series.append({step: value for step, value in zip(steps, values, strict=True) if math.isfinite(value)})
    series = [one for one in series if one]
    steps = np.array(sorted(set.intersection(*map(set, series)) if series else ()), dtype=np.int64)
    table = np.array([[one[step] for step in steps] for one in series], dtype=np.float64).reshape(len(series), len(steps))
    if kind == "train" and len(steps) > CURVE_POINTS:
        blocks = np.array_split(np.arange(len(steps)), CURVE_POINTS)
        table = np.stack([table[:, block].mean(axis=1) for block in blocks], axis=1)
        steps = np.array([steps[block].mean() for block in blocks])
    mean = table.mean(axis=0) if series else np.empty(0)
    spread = table.std(axis=0, ddof=1) if len(series) > 1 else np.zeros(len(steps))
    return steps, mean, spread


def gradient_norms(groups: list[Group], look: dict[str, Look]) -> Figure | None:
    """The gradient norm before clipping, one panel per group (first seed), with the baseline's behind it."""
    shown = [group for group in groups if any(run.norms for run in group.runs.values())]
    if not shown:
        return None
    figure, panels = grid(len(shown), sharey=True)
    for group, panel in zip(shown, panels, strict=True):
        run = next(run for run in group.runs.values() if run.norms)
        behind = group.baseline.runs.get(run.seed) if group.baseline and not group.is_baseline else None
        if behind:
            panel.plot(*positive(behind.norms), color="#bbbbbb", linewidth=0.8)
        panel.plot(*positive(run.norms), color=look[group.label].colour, linewidth=0.9)
        clip, warmup = run.config["train"].get("grad_clip", 0), run.config["schedule"].get("warmup_steps", 0)
        if clip > 0:
            panel.axhline(clip, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        if warmup:
            panel.axvspan(0, warmup, color="#f2f2f2", zorder=0)
        panel.set_yscale("log")
        panel.set_title(titled(group, run))
    figure.supxlabel("step (shaded: warm-up; dashed: the norm that is clipped to; grey: the baseline)", fontsize=10)
    figure.supylabel("gradient norm", fontsize=10)
    return figure


def positive(norms: dict[int, float]) -> tuple[list[int], list[float]]:
    """What a logarithmic axis can show."""
    kept = {step: norm for step, norm in norms.items() if 0 < norm < math.inf}
    return list(kept), list(kept.values())


def emission_differences(comparison: Comparison, look: dict[str, Look]) -> Figure | None:
    """gCO2eq per 1,000 training steps minus the baseline's, with the 95 % interval over seeds where there is one."""
    rows = [(group, group.difference("gco2eq_per_1000_steps")) for group in comparison.groups]
    rows = [(group, difference) for group, difference in rows if difference and difference.mean is not None]
    if not rows:
        return None
    figure = Figure(figsize=(9, 1.4 + 0.42 * len(rows)), layout="constrained")
    panel = figure.subplots()
    several = len(comparison.families) > 1
    for row, (group, difference) in enumerate(rows):
        panel.barh(row, difference.mean, color=look[group.label].colour, height=0.62)
        ends = [0, difference.mean]
        if difference.low is not None:
            error = [[difference.mean - difference.low], [difference.high - difference.mean]]
            panel.errorbar(difference.mean, row, xerr=error, color="black", capsize=3, linewidth=1)
            ends += [difference.low, difference.high]
        right = difference.mean >= 0
        panel.annotate(
            f"{difference.mean:+.3g}", (max(ends) if right else min(ends), row), xytext=(6 if right else -6, 0),
            textcoords="offset points", va="center", ha="left" if right else "right",
        )  # fmt: skip
    panel.set_yticks(range(len(rows)), [f"{group.family} {group.label}" if several else group.label for group, _ in rows])
    panel.invert_yaxis()
    panel.axvline(0, color="black", linewidth=0.8)
    panel.margins(x=0.18)
    panel.set_xlabel("gCO2eq per 1,000 training steps, difference to the baseline (negative is greener)")
    panel.grid(axis="y", visible=False)
    return figure


def pareto(groups: list[Group], look: dict[str, Look]) -> Figure | None:
    """Final validation NLL against the energy of training; the line joins the groups that no other beats in both."""
    points = [(group, group.summary("kwh_train"), group.summary("val_nll")) for group in groups]
    points = [point for point in points if finite(point[1].mean) and finite(point[2].mean)]
    if not points:
        return None
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    panel = figure.subplots()
    for group, energy, nll in points:
        style = look[group.label]
        panel.errorbar(
            energy.mean, nll.mean, xerr=energy.std, yerr=nll.std, color=style.colour, marker=style.marker, markersize=8, capsize=2,
            linewidth=1, linestyle="none",
        )  # fmt: skip
    front = [(e.mean, q.mean) for _, e, q in points if not any(dominates(x.mean, y.mean, e.mean, q.mean) for _, x, y in points)]
    panel.plot(*zip(*sorted(front), strict=True), color=GREY, linewidth=1, zorder=0)
    panel.set_xlabel("energy of training, kWh")
    panel.set_ylabel("final validation NLL, nats/token")
    panel.xaxis.set_major_locator(MaxNLocator(6))
    legend(figure, [group for group, _, _ in points], look, lines=False)
    return figure


def dominates(x: float, y: float, other_x: float, other_y: float) -> bool:
    return x <= other_x and y <= other_y and (x, y) != (other_x, other_y)


def hidden_states(groups: list[Group], look: dict[str, Look]) -> Figure | None:
    """Validation hidden states on their first two principal components, one panel per group (first seed that has them)."""
    shown = [(group, *found) for group in groups if (found := first_states(group))]
    if not shown:
        return None
    figure, panels = grid(len(shown), height=2.9)
    for (group, run, states), panel in zip(shown, panels, strict=True):
        panel.scatter(*states["projection"].T, s=5, color=look[group.label].colour, alpha=0.6, linewidths=0)
        shares = states["eigenvalues"] / states["eigenvalues"].sum()
        panel.set_xlabel(f"PC 1 ({shares[0]:.0%})")
        panel.set_ylabel(f"PC 2 ({shares[1]:.0%})" if len(shares) > 1 else "")
        panel.set_title(titled(group, run))
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.yaxis.set_major_locator(MaxNLocator(5))
    return figure


def spectrum(groups: list[Group], look: dict[str, Look]) -> Figure | None:
    """Eigenvalues of the hidden states' covariance as shares of the variance, on logarithmic axes (first seed that has them)."""
    shown = [(group, found[1]) for group in groups if (found := first_states(group))]
    if not shown:
        return None
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    panel = figure.subplots()
    for group, states in shown:
        shares = states["eigenvalues_every_position"] / states["eigenvalues_every_position"].sum()
        kept = shares > 1e-9  # below: rounding, or fewer vectors than dimensions
        style = look[group.label]
        panel.loglog(np.arange(1, len(shares) + 1)[kept], shares[kept], color=style.colour, linestyle=style.line)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("principal component")
    panel.set_ylabel("share of the variance")
    legend(figure, [group for group, _ in shown], look, markers=False, counted=False)
    return figure


def first_states(group: Group) -> tuple[RunFolder, dict[str, np.ndarray]] | None:
    for run in group.runs.values():
        states = run.hidden_states()
        if states and "projection" in states:
            return run, states
    return None


def grid(count: int, height: float = 2.4, sharey: bool = False) -> tuple[Figure, list]:
    """`count` panels in rows of up to four."""
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(3.2 * columns, 4.5), height * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=sharey, squeeze=False).flatten()
    for panel in panels[count:]:
        panel.remove()
    return figure, list(panels[:count])


def legend(figure: Figure, groups: list[Group], look: dict[str, Look], lines: bool = True, markers: bool = True, counted: bool = True) -> None:
    """The groups below the panels, where they hide nothing; `counted`: with their numbers of seeds."""
    names = {group.label: f"{group.label} (n = {len(group.runs)})" if counted else group.label for group in groups}
    handles = [
        matplotlib.lines.Line2D(
            [], [], color=look[group.label].colour, linestyle=look[group.label].line if lines else "none",
            marker=look[group.label].marker if markers else None, markersize=6, label=names[group.label],
        )
        for group in groups
    ]  # fmt: skip
    longest = max(map(len, names.values()))
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, min(4, len(groups), 90 // (longest + 6))), handlelength=3.2)


def titled(group: Group, run: RunFolder) -> str:
    return textwrap.fill(f"{group.label}, seed\N{NO-BREAK SPACE}{run.seed}", TITLE_WIDTH)


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
