import json
import math
import shutil

import numpy as np
import pytest

from commands import InputError
from eval.run_folder import read_json, read_run
from eval.run_metrics import Terms, measure
from training.emissions import COLUMNS


def test_energy_of_lost_steps_is_counted_on_the_way(make_run):
    path = make_run("linear", 1)
    lines = [json.loads(text) for text in (path / "metrics.jsonl").read_text().splitlines() if '"emissions"' not in text]
    spent = [(1, 100, 1.0), (101, 150, 0.5), (101, 200, 1.0)]  # a crash at 150 went back to 100
    lines += [{"kind": "emissions", "scope": "training", "first_step": a, "last_step": b, "kwh": kwh} for a, b, kwh in spent]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(path)
    np.testing.assert_allclose(run.energy_at("kwh", [0, 50, 100, 150, 200, 250]), [0, 0.5, 1.5, 2.0, 2.5, np.nan])


def test_not_a_run_folder(make_run, tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        read_run(tmp_path / "nothing")
    path = make_run("linear", 1)
    shutil.copy(path / "run.json", path / "config.toml")
    with pytest.raises(InputError, match="not valid TOML"):
        read_run(path)
    (path / "config.toml").write_text("seed = 1\n")
    with pytest.raises(InputError, match="no model, head"):
        read_run(path)


def test_an_unmeasured_interval_is_not_zero(make_run):
    path = make_run("linear", 1)
    text = (path / "metrics.jsonl").read_text().replace('"kwh": 0.0001', '"kwh": null')
    (path / "metrics.jsonl").write_text(text)
    assert np.isnan(read_run(path).energy_at("kwh", [100])).all()
    assert np.isnan(read_run(make_run("cosine", 1, emissions=False)).energy_at("kwh", [100])).all()


def test_final_is_only_what_follows_the_last_update(make_run):
    assert read_run(make_run("linear", 1)).final["step"] == 200
    assert read_run(make_run("linear", 2, steps=150)).final == {}


def test_options_tell_heads_of_one_name_apart(make_run):
    run = read_run(make_run("minkowski", 1, options={"p": 1.5, "exponent": "auto"}, tied=False))
    assert run.options == (("exponent", "auto"), ("p", 1.5), ("untied", True))
    assert (run.family, run.head, run.seed, run.masked) == ("gpt2", "minkowski", 1, False)


def test_broken_json_reads_as_empty_and_non_finite_numbers_come_back(tmp_path):
    path = tmp_path / "eval.json"
    assert read_json(path) == {}
    path.write_text('{"a": 1')
    assert read_json(path) == {}
    path.write_text('{"a": "inf", "b": {"c": "nan"}}')
    value = read_json(path)
    assert value["a"] == math.inf and math.isnan(value["b"]["c"])


def test_tables_of_several_nodes_are_summed_and_lost_steps_told_apart(make_run):
    path = make_run("linear", 1)
    rows = {"": [(1, 0, 1, 100, 1.0), (1, 0, 101, 150, 0.5), (2, 0, 101, 200, 1.0)], ".node1": [(1, 1, 1, 100, 2.0), (2, 1, 101, 200, 2.0)]}
    for name, table in rows.items():
        lines = [",".join(COLUMNS)]
        for session, node, first, last, kwh in table:
            row = dict.fromkeys(COLUMNS, "") | {"version": 1, "session": session, "node": node, "first_step": first, "last_step": last}
            row |= {"steps": last - first + 1, "scope": "training", "kwh": kwh, "gco2eq": 400 * kwh, "seconds": 1}
            lines.append(",".join(str(row[column]) for column in COLUMNS))
        (path / f"emissions{name}.csv").write_text("\n".join(lines) + "\n")
    run = read_run(path)
    np.testing.assert_allclose(run.energy_at("kwh", [0, 50, 100, 200]), [0, 1.5, 3.5, 6.5])
    values = measure(run, None, Terms())
    assert values["kwh_train"] == 6.5 and values["gco2eq_train"] == 2600 and values["kwh_lost"] == 0.5
    assert values["kwh_per_1000_steps"] == pytest.approx(1000 * 6.5 / 250)
