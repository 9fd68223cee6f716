import csv
import io
import json
import re

import pytest

from eval.comparison import compare
from eval.report import CAPTIONS, as_csv, as_json, report, terminal_table
from eval.run_folder import read_run
from eval.run_metrics import METRICS
from training.record import strict_json


@pytest.fixture
def comparison(make_run):
    """Two heads, three seeds; the third cosine run broke off."""
    paths = [make_run("linear", seed) for seed in (1, 2, 3)]
    paths += [make_run("cosine", seed, level=-0.25, steps=120 if seed == 3 else None) for seed in (1, 2, 3)]
    return compare([read_run(path) for path in paths], read_run(paths[0]))


def rows_of(comparison):
    return list(csv.DictReader(io.StringIO(as_csv(comparison))))


def test_csv_has_a_row_per_group_and_metric(comparison):
    rows = {(row["group"], row["metric"]): row for row in rows_of(comparison)}
    row = rows["cosine", "val_nll"]
    assert float(row["difference"]) == pytest.approx(-0.25) and row["difference_n"] == "2" and row["n"] == "2"
    assert row["wilcoxon_p"] == "" and row["note"] == "too few seeds for a test" and row["better"] == "lower"
    assert rows["linear", "val_nll"]["difference"] == "" and rows["linear", "val_nll"]["n"] == "3"
    assert ("cosine", "mfu") not in rows  # which no run has


def test_json_holds_every_runs_value(comparison):
    content = json.loads(strict_json(as_json(comparison)))
    linear, cosine = content["groups"]
    assert content["baseline"] == "gpt2 linear" and linear["is_baseline"] and linear["metrics"]["val_nll"]["difference"] is None
    assert cosine["metrics"]["val_nll"]["values"] == {"1": pytest.approx(1.9, abs=0.1), "2": pytest.approx(1.9, abs=0.1), "3": None}
    assert cosine["metrics"]["val_nll"]["difference"]["mean"] == pytest.approx(-0.25)
    assert cosine["runs"]["1"].endswith("gpt2-cosine-s1") and cosine["spikes"] == {"1": [], "2": [], "3": []}


def test_every_number_of_the_report_is_in_the_json(comparison):
    text = report(comparison, [])
    known = {"2", "3"}  # numbers of seeds
    for group in as_json(comparison)["groups"]:
        known.add(f"{group['learning_rate']:g}")
        for key, metric in group["metrics"].items():
            difference = metric["difference"] or {}
            values = [metric["mean"], *(difference.get(name) for name in ("mean", "low", "high"))]
            known |= {format(value, METRICS[key].format) for value in values if value is not None}
            known |= {format(100 * value, ".2f") for value in values if value is not None and key in ("pca5", "pc2_ev")}
            known |= {format(metric["std"], ".2g"), "0"} if metric["std"] is not None else set()
    tables = [line for line in text.splitlines() if line.startswith("|") and "`" not in line and "---" not in line]
    cells = [cell for line in tables for cell in re.split(r"\||±| to ", line.partition("|")[2].partition("|")[2])]
    numbers = [cell.replace(" points", "").replace("(n = 2)", "").strip().removeprefix("+") for cell in cells]
    numbers = [cell for cell in numbers if re.fullmatch(r"-?[\d,]+(\.\d+)?(e[+-]?\d+)?", cell)]
    assert len(numbers) > 100
    assert [cell for cell in numbers if cell not in known] == []


def test_the_report_shows_each_figure_with_a_sentence(comparison):
    names = [f"{kind}_gpt2" for kind in CAPTIONS if kind != "emissions"] + ["emissions"]
    text = report(comparison, names)
    for name in names:
        assert f"]({name}.png)" in text and f"]({name}.svg)" in text
    for caption in CAPTIONS.values():
        assert text.count(caption) == 1
    assert "1 − variance" in text and "after the warm-up" in text
    assert "ended at step 120 of 200" in text
    assert "too few seeds for a test" in text


def test_a_missing_seed_shows_in_the_cell(comparison):
    line = next(line for line in report(comparison, []).splitlines() if line.startswith("| val NLL"))
    assert "(n = 2)" in line and line.count("±") == 2


def test_pca_differences_are_percentage_points(make_run):
    paths = [make_run("linear", 1), make_run("cosine", 1)]
    metrics = (paths[1] / "metrics.jsonl").read_text().replace('"pca5": 0.5', '"pca5": 0.4')
    (paths[1] / "metrics.jsonl").write_text(metrics)
    text = report(compare([read_run(path) for path in paths], read_run(paths[0])), [])
    assert "| cosine | PCA5 | -10.00 points | – | 1 | one seed: no spread, no test |" in text


def test_the_terminals_table_is_aligned(comparison):
    lines = terminal_table(comparison).splitlines()
    assert len({len(line) for line in lines[:3]}) == 1
    assert "gpt2 linear *" in lines[1] and any(line.startswith("note: ") for line in lines)


def test_masked_models_have_a_pseudo_perplexity(make_run):
    paths = [make_run(head, 1, family=family) for family in ("gpt2", "bert") for head in ("linear", "cosine")]
    causal, masked = report(compare([read_run(path) for path in paths], read_run(paths[0])), []).split("## bert")
    assert "| val perplexity |" in causal and "pseudo-perplexity |" not in causal
    assert "| val pseudo-perplexity |" in masked and "| val perplexity |" not in masked
