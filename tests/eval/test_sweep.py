import json
import signal
import time
import tomllib

import pytest

from commands import InputError
from config import load_config
from eval.sweep import Plan, is_finished, main, make_plans, seeds


def plans(config_file, tmp_path, heads="linear,cosine", numbers="1,2", families=(None,), overrides=()):
    return make_plans(str(config_file), list(families), heads.split(","), seeds(numbers), (tmp_path / "out", list(overrides)))


def test_one_plan_per_family_head_and_seed(config_file, tmp_path):
    found = plans(config_file, tmp_path, families=("gpt2", "bert"))
    assert [plan.name for plan in found] == [f"{f}-{h}-seed{s}" for f in ("gpt2", "bert") for h in ("linear", "cosine") for s in (1, 2)]
    for plan in found:
        config = tomllib.loads(plan.toml)
        assert (config["model"]["name"], config["head"]["name"], config["seed"]) == (plan.family, plan.head, plan.seed)
        assert config["out_dir"] == str(tmp_path / "out" / plan.name) and config["train"]["max_steps"] == 6
    assert not (tmp_path / "out").exists()  # planning writes nothing


def test_options_after_colons_and_flags_for_all(config_file, tmp_path):
    heads = "linear,minkowski:p=1.5,cosine:link=gibbs:tau=0.1,cosine:optimizer.learning_rate=1e-2:model.tie_weights=false"
    found = plans(config_file, tmp_path, heads, "1", overrides=["--train.max_steps=9"])
    tables = [tomllib.loads(plan.toml) for plan in found]
    assert [table["head"] for table in tables[1:3]] == [{"name": "minkowski", "p": 1.5}, {"name": "cosine", "link": "gibbs", "tau": 0.1}]
    assert tables[3]["optimizer"]["learning_rate"] == 0.01 and tables[3]["model"]["tie_weights"] is False
    assert all(table["train"]["max_steps"] == 9 for table in tables)
    assert len({plan.name for plan in found}) == 4 and all("/" not in plan.name and "=" not in plan.name for plan in found)


def test_options_in_the_file_belong_to_the_files_head(config_file, tmp_path):
    text = config_file.read_text(encoding="utf-8").replace('name = "linear"', 'name = "cosine"\nexponent = 7.0')
    config_file.write_text(text, encoding="utf-8")
    linear, cosine = (tomllib.loads(plan.toml)["head"] for plan in plans(config_file, tmp_path, numbers="1"))
    assert linear == {"name": "linear"} and cosine == {"name": "cosine", "exponent": 7.0}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--heads", "linear,cosine:exponnent=3", "--seeds", "1"], "exponnent.*exponent"),
        (["--heads", "linear", "--seeds", "1,x"], "whole numbers"),
        (["--heads", "linear,linear", "--seeds", "1"], "asked for twice"),
        (["--heads", ",", "--seeds", "1"], "--heads is empty"),
        (["--heads", "linear", "--seeds", "1", "--baseline", "cosine"], "not one of --heads"),
        (["--heads", "linear", "--seeds", "1", "--parallel", "0"], "at least 1"),
        (["--heads", "linear", "--seeds", "1", "--trian.max_steps=3"], "unknown key"),
        (["--seeds", "1"], "--heads"),
    ],
)
def test_bad_input_is_found_before_anything_is_written(config_file, tmp_path, arguments, message):
    with pytest.raises(InputError, match=message) as error:
        main([str(config_file), "--out", str(tmp_path / "out"), *arguments])
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_only_the_very_same_finished_config_counts_as_done(config_file, tmp_path):
    plan = plans(config_file, tmp_path)[0]
    plan.config_path.parent.mkdir(parents=True)
    plan.run_dir.mkdir()
    assert not is_finished(plan)
    (plan.run_dir / "run.json").write_text(json.dumps({"exit_reason": "finished"}))
    (plan.run_dir / "config.toml").write_text(plan.toml)
    assert not is_finished(plan)
    plan.config_path.write_text(plan.toml, encoding="utf-8")
    assert is_finished(plan)
    assert not is_finished(Plan(plan.name, plan.family, plan.head, plan.seed, plan.toml + "#", plan.out_dir))
    steps = load_config(plan.config_path).train.max_steps
    for by_hand, outcome in ((steps - 1, False), (steps, True), (steps + 1, None)):
        (plan.run_dir / "config.toml").write_text(plan.toml.replace(f"max_steps = {steps}", f"max_steps = {by_hand}"))
        if outcome is None:
            with pytest.raises(InputError, match=f"was trained for {by_hand} steps"):
                is_finished(plan)
        else:
            assert is_finished(plan) == outcome
    (plan.run_dir / "config.toml").write_text(plan.toml)
    (plan.run_dir / "run.json").write_text(json.dumps({"exit_reason": "SIGTERM"}))
    assert not is_finished(plan)


@pytest.mark.slow
def test_what_can_be_trained_is_compared_and_kept(config_file, tmp_path, execute):
    """Two heads x two seeds, and one head that cannot be trained; then the same command again."""
    out = tmp_path / "out"
    heads = "cosine:optimizer.learning_rate=1e30,linear,cosine"
    command = ["-m", "eval.sweep", config_file, "--heads", heads, "--seeds", "1,2", "--out", out, "--parallel", 2, "--train.max_steps=4"]
    done = execute(*command, timeout=600)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    for seed in (1, 2):
        name = f"gpt2-cosine-optimizer.learning_rate_1e30-seed{seed}"
        assert name in done.stderr and f"{name}: FAILED (status 1): error: " in done.stdout
    comparison = json.loads((out / "comparison.json").read_text())
    assert [(group["label"], list(group["runs"])) for group in comparison["groups"]] == [("linear", ["1", "2"]), ("cosine", ["1", "2"])]
    for group in comparison["groups"]:
        assert group["metrics"]["val_nll"]["n"] == group["metrics"]["bits_per_byte"]["n"] == 2
    assert (out / "report.md").exists() and (out / "radar_gpt2.svg").exists()
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("*/eval.json")}
    again = execute(*command, timeout=600)
    assert again.returncode == 1 and again.stdout.count("was finished") == 4 and len(stamps) == 4
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/eval.json")} == stamps


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_where_it_was(config_file, tmp_path, execute):
    out = tmp_path / "out"
    command = ["-m", "eval.sweep", config_file, "--heads", "linear", "--seeds", "1", "--out", out, "--train.max_steps=400"]
    first = execute.start(*command)
    metrics = out / "gpt2-linear-seed1" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count('"train"') > 5):
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    text, _ = first.communicate(timeout=60)
    assert first.returncode == 143, text
    reached = len(metrics.read_text().splitlines())
    second = execute(*command, timeout=300)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "gpt2-linear-seed1: resumes" in second.stdout
    run = json.loads((out / "gpt2-linear-seed1" / "run.json").read_text())
    assert len(run["earlier_sessions"]) == 1 and reached > 5
    steps = [line["step"] for line in map(json.loads, metrics.read_text().splitlines()) if line["kind"] == "train"]
    assert steps == list(range(1, 401))
