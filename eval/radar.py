"""The radar chart of one family: seven axes, outward is better, and the raw value of every group at every spoke."""

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, HPacker, TextArea, VPacker

from eval.comparison import Group
from eval.run_metrics import METRICS

AXES = {  # metric -> what stands at its spoke; which way is better is METRICS'
    "train_perplexity": "train perplexity",
    "val_perplexity": "val perplexity",
    "gradient_stability": "gradient stability",
    "effective_rank": "effective rank",
    "pca5": "PCA5",
    "speed": "speed (steps)",
    "gco2eq_per_1000_steps": "emissions\n(g per 1,000 steps)",
}
PSEUDO = "pseudo-perplexity"  # of masked positions
INNERMOST = 0.15  # radius of the worst group: at the centre, the axes could not be told apart
VALUES_PER_COLUMN = 4
WIDTH, CHART_HEIGHT, CIRCLE, LEGEND_ROW = 11, 8.4, 5.3, 0.24  # inches
LEGEND_CHARACTERS = 100  # that fit side by side


def radar(groups: list[Group], look: dict) -> Figure | None:
    """Each axis runs from the worst to the best of the groups; a group without a value on an axis has a gap there."""
    means = {axis: [group.summary(axis).mean for group in groups] for axis in AXES}
    axes = [axis for axis in AXES if any(value is not None and math.isfinite(value) for value in means[axis])]
    if len(axes) < 3:
        return None
    radii = {axis: normalise(means[axis], METRICS[axis].better) for axis in axes}
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(axes)) / len(axes)  # the first spoke points up, the rest follow clockwise
    handles, columns = legend_entries(groups, look)
    height = CHART_HEIGHT + LEGEND_ROW * math.ceil(len(handles) / columns)
    figure = Figure(figsize=(WIDTH, height))
    bottom = height - (CHART_HEIGHT + CIRCLE) / 2 - 0.2  # inches: the circle in the middle of the chart, the legend below it
    panel = figure.add_axes(((WIDTH - CIRCLE) / 2 / WIDTH, bottom / height, CIRCLE / WIDTH, CIRCLE / height))
    panel.set_aspect("equal")
    panel.set_axis_off()
    panel.set_xlim(-1.02, 1.02)
    panel.set_ylim(-1.02, 1.02)
    for ring in (INNERMOST, (1 + INNERMOST) / 2, 1):
        panel.plot(*circle(ring), color="#cccccc", linewidth=0.8)
    for angle in angles:
        panel.plot([0, np.cos(angle)], [0, np.sin(angle)], color="#cccccc", linewidth=0.8)
    for index, group in enumerate(groups):
        radius = np.array([radii[axis][index] for axis in axes])
        style = look[group.label]
        x, y = radius * np.cos(angles), radius * np.sin(angles)
        panel.plot(np.append(x, x[0]), np.append(y, y[0]), color=style.colour, linestyle=style.line, marker=style.marker, markersize=6)
    for axis, angle in zip(axes, angles, strict=True):
        name = AXES[axis].replace("perplexity", PSEUDO) if groups[0].masked else AXES[axis]
        panel.add_artist(spoke((name, METRICS[axis].format), means[axis], angle, [look[group.label] for group in groups]))
    figure.legend(handles=handles, loc="lower center", ncols=columns, handlelength=3.2)
    figure.text(0.5, 1 - 0.15 / height, f"{groups[0].family}: outward is better", ha="center", va="top", fontsize=13, fontweight="bold")
    return figure


def normalise(values: list[float | None], better: int) -> list[float]:
    """Radius of each value, worst to best -> INNERMOST to 1; all equal: 1. NaN where there is no value, infinite is the worst."""
    signed = np.array([math.nan if value is None else better * value for value in values], dtype=np.float64)
    finite = signed[np.isfinite(signed)]
    low, high = finite.min(), finite.max()
    if high > low:
        radius = INNERMOST + (1 - INNERMOST) * (signed - low) / (high - low)
    else:
        radius = np.where(np.isnan(signed), math.nan, 1.0)
    radius[np.isneginf(signed)] = INNERMOST
    return list(radius)


def circle(radius: float) -> tuple[np.ndarray, np.ndarray]:
    turn = np.linspace(0, 2 * np.pi, 181)
    return radius * np.cos(turn), radius * np.sin(turn)


def spoke(axis: tuple[str, str], values: list[float | None], angle: float, styles: list) -> AnnotationBbox:
    """`axis` is its name and its numbers' format; the name and, in columns, every group's marker and raw value, set outside the circle."""
    title, form = axis
    cells = []
    for style, value in zip(styles, values, strict=True):  # dark numbers: pale colours carry a marker, not a text
        marker = TextArea(style.glyph, textprops={"color": style.colour, "fontsize": 9})
        cells.append(HPacker(children=[marker, TextArea(raw(value, form), textprops={"fontsize": 9})], pad=0, sep=3))
    columns = [VPacker(children=cells[at : at + VALUES_PER_COLUMN], pad=0, sep=3) for at in range(0, len(cells), VALUES_PER_COLUMN)]
    name = TextArea(title, textprops={"fontweight": "bold", "fontsize": 10, "multialignment": "center"})
    box = VPacker(children=[name, HPacker(children=columns, pad=0, sep=10, align="top")], pad=0, sep=4, align="center")
    x, y = np.cos(angle), np.sin(angle)
    return AnnotationBbox(
        box, (1.1 * x, 1.1 * y), box_alignment=((1 - x) / 2, (1 - y) / 2), frameon=False, pad=0, annotation_clip=False
    )  # fmt: skip


def raw(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def legend_entries(groups: list[Group], look: dict) -> tuple[list, int]:
    """Handles, and how many fit side by side."""
    handles = []
    for group in groups:
        style = look[group.label]
        label = f"{group.label}, n = {len(group.runs)}" + (" (baseline)" if group.is_baseline else "")
        handles.append(Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=6, label=label))
    longest = max(len(handle.get_label()) for handle in handles)
    return handles, max(1, min(4, len(groups), LEGEND_CHARACTERS // (longest + 6)))
