import json

import pytest

from commands import InputError
from eval.compare import main

FIGURES = {"radar_gpt2", "curves_gpt2", "gradient_norms_gpt2", "hidden_states_gpt2", "spectrum_gpt2", "pareto_gpt2", "emissions"}


def test_the_folder_holds_tables_report_and_figures(make_run, tmp_path, capsys):
    paths = [make_run(head, seed, hidden=True) for head in ("linear", "cosine") for seed in (1, 2)]
    out = tmp_path / "comparison"
    main([*map(str, paths), "--baseline", str(paths[1]), "--out", str(out)])
    names = {path.name for path in out.iterdir()}
    assert names == {"comparison.csv", "comparison.json", "report.md"} | {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert "gpt2 cosine" in capsys.readouterr().out
    groups = json.loads((out / "comparison.json").read_text())["groups"]
    assert [(group["label"], group["is_baseline"]) for group in groups] == [("linear", True), ("cosine", False)]


def test_a_refusal_writes_nothing(make_run, tmp_path):
    paths = [make_run("linear", 1), make_run("cosine", 2)]
    with pytest.raises(InputError, match="data order"):
        main([*map(str, paths), "--baseline", str(paths[0]), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_none(make_run, tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        main([str(tmp_path), "--baseline", str(make_run("linear", 1)), "--out", str(tmp_path / "out")])
