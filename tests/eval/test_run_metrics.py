import json
import math

import pytest

from eval.run_folder import read_run
from eval.run_metrics import METRICS, Terms, measure


def test_every_metric_of_a_whole_run_is_there(make_run):
    path = make_run("linear", 1)
    evaluation = read_run(path).final | {"val_nll": 2.25, "bits_per_byte": 1.5}
    (path / "eval.json").write_text(json.dumps(evaluation))
    run = read_run(path)
    values = measure(run, run, Terms(whole=True))
    assert set(values) == set(METRICS)
    assert {key for key, value in values.items() if value is None} == {"mfu", "kwh_checkpoint", "kwh_lost"}  # which these runs do not have
    assert values["bits_per_byte"] == 1.5 and values["val_nll"] == 2.25 and values["memory_mb"] == 300 and values["tokens_per_s"] == 25600
    assert values["speed"] == values["gradient_stability"] == values["spikes"] == 0
    assert values["train_perplexity"] == pytest.approx(math.exp(values["train_nll"]))


def test_without_a_baseline_pairwise_figures_are_absent(make_run):
    values = measure(read_run(make_run("linear", 1)), None, Terms())
    assert values["gradient_stability"] is values["speed"] is values["kwh_to_target"] is None
    assert values["time_to_90"] == 100


def test_bits_per_byte_of_another_step_are_not_the_final_ones(make_run):
    path = make_run("linear", 1)
    (path / "eval.json").write_text(json.dumps({"step": 100, "bits_per_byte": 1.5}))
    assert measure(read_run(path), None, Terms(whole=True))["bits_per_byte"] is None


def test_energy_until_a_given_loss(make_run):
    run = read_run(make_run("linear", 1))
    evaluations = {line["step"]: line["val_nll"] for line in run.metrics.eval}
    halfway = (evaluations[50] + evaluations[100]) / 2
    assert measure(run, None, Terms(target_nll=halfway))["kwh_to_target"] == pytest.approx(0.75e-4)  # at step 75 of 100 per 1e-4 kWh
    assert measure(run, None, Terms(target_nll=0.1))["kwh_to_target"] is None


def test_overflowing_perplexity_is_infinite(make_run):
    path = make_run("linear", 1)
    text = (path / "metrics.jsonl").read_text().splitlines()
    last = json.loads(next(line for line in reversed(text) if '"kind": "eval"' in line)) | {"train_nll": 1000.0}
    (path / "metrics.jsonl").write_text("\n".join([*text, json.dumps(last)]) + "\n")
    assert measure(read_run(path), None, Terms())["train_perplexity"] == math.inf
