import itertools
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.offsetbox import AnnotationBbox
from matplotlib.text import Text

from eval.comparison import compare
from eval.figures import COLOURS, draw_all, looks, over_seeds, save
from eval.run_folder import read_run

HEADS = [
    ("linear", {}), ("cosine", {}), ("euclidean", {}), ("minkowski", {"p": 1.5}), ("minkowski", {"p": 3.0}), ("manhattan", {}),
    ("bray_curtis", {}), ("mahalanobis", {"covariance": "cholesky"}),
]  # fmt: skip


@pytest.fixture
def eight(make_run):
    """Eight heads, two seeds each."""
    return compare_eight(make_run, HEADS)


def compare_eight(make_run, heads):
    paths = [
        make_run(
            head,
            seed,
            options=options,
            level=0.07 * (5 * index % 8),
            energy=1 + 0.1 * (3 * index % 8 - 2),
            hidden=True,
            name=f"r{index}s{seed}",
        )
        for index, (head, options) in enumerate(heads)
        for seed in (1, 2)
    ]
    return compare([read_run(path) for path in paths], read_run(paths[0]))


def visible_texts(figure):
    """Every text as it will be drawn, with its box in pixels. Tick labels outside their axis' range are not drawn."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = []
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip():
            texts.append((text.get_text(), text.get_window_extent(renderer)))
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                for label in (tick.label1, tick.label2):
                    if not low <= tick.get_loc() <= high or not label.get_visible():
                        hidden.add((label.get_text(), label.get_window_extent(renderer).bounds))
    return [(text, box) for text, box in texts if (text, box.bounds) not in hidden]


LONG = [("cosine", {"link": "gibbs", "tau": 0.1 * k, "hidden_scale": 0.02 * k, "learn_exponent": True}) for k in range(1, 8)]


@pytest.mark.parametrize("heads", [HEADS, [("linear", {}), *LONG]], ids=["short", "long"])
def test_no_text_overlaps_another_at_eight_runs(make_run, heads):
    figures = draw_all(compare_eight(make_run, heads))
    assert set(figures) == {
        "radar_gpt2", "curves_gpt2", "gradient_norms_gpt2", "hidden_states_gpt2", "spectrum_gpt2", "pareto_gpt2", "emissions",
    }  # fmt: skip
    for name, figure in figures.items():
        texts = visible_texts(figure)
        assert len(texts) > 8, name
        for (one, box), (other, another) in itertools.combinations(texts, 2):
            overlap = min(box.x1, another.x1) - max(box.x0, another.x0), min(box.y1, another.y1) - max(box.y0, another.y0)
            assert min(overlap) <= 1, f"{name}: {one!r} lies on {other!r}"


def test_the_radar_shows_every_raw_value_at_its_spoke(eight):
    figure = draw_all(eight)["radar_gpt2"]
    spokes = [artist for artist in figure.axes[0].get_children() if isinstance(artist, AnnotationBbox)]
    texts = {text for spoke in spokes for area in spoke.findobj(Text) for text in [area.get_text()]}
    assert len(spokes) == 7
    for group in eight.groups:
        assert format(group.summary("val_perplexity").mean, ".4g") in texts
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for spoke in spokes:  # the numbers lie outside the circle, where no line can cross them
        box = spoke.get_window_extent(renderer).transformed(figure.axes[0].transData.inverted())
        nearest = np.clip(0, box.x0, box.x1), np.clip(0, box.y0, box.y1)
        assert np.hypot(*nearest) > 1.0


def test_groups_are_told_apart_without_colour(eight):
    look = looks(eight)
    assert len({(style.marker, str(style.line)) for style in look.values()}) == len(look) == 8
    assert look["linear"].colour == "black"


def test_colours_differ_for_colour_blind_readers():
    """Simulated deuteranopia and protanopia (Vienot et al. 1999): every pair stays further apart than two shades of one colour."""
    matrices = {
        "deuteranopia": [[0.29275, 0.70725, -0.02234], [0.29275, 0.70725, -0.02234], [-0.02234, 0.02234, 1.0]],
        "protanopia": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    }
    for name, matrix in matrices.items():
        linear = np.array([to_rgb(colour) for colour in COLOURS[:7]]) ** 2.2
        seen = np.clip(linear @ np.array(matrix).T, 0, 1) ** (1 / 2.2)
        gaps = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
        assert min(gaps) > 0.12, (name, min(gaps))


def test_files_are_png_and_svg_and_the_same_each_time(eight, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        save(draw_all(eight)["pareto_gpt2"], tmp_path / folder, "pareto")
    assert (tmp_path / "a/pareto.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert ElementTree.parse(tmp_path / "a/pareto.svg").getroot().tag.endswith("svg")
    for name in ("pareto.png", "pareto.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_seed_bands_are_mean_and_standard_deviation(make_run):
    runs = [read_run(make_run("linear", seed, level=level)) for seed, level in ((1, 0.0), (2, 1.0))]
    steps, mean, spread = over_seeds(runs, "eval", "val_nll")
    values = [[line["val_nll"] for line in run.metrics.eval] for run in runs]
    assert list(steps) == [0, 50, 100, 150, 200]
    assert mean[2] == pytest.approx((values[0][2] + values[1][2]) / 2)
    assert spread[2] == pytest.approx(abs(values[0][2] - values[1][2]) / 2**0.5)


def test_runs_with_nothing_to_draw_draw_nothing(make_run):
    paths = [make_run(head, 1) for head in ("linear", "cosine")]
    for path in paths:
        (path / "metrics.jsonl").unlink()
    assert draw_all(compare([read_run(path) for path in paths], read_run(paths[0]))) == {}


def test_one_run_alone_is_drawn(make_run):
    path = make_run("linear", 1, hidden=True)
    run = read_run(path)
    assert "curves_gpt2" in draw_all(compare([run], run))
