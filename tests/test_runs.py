import json
from dataclasses import replace

import pytest
import torch

import runs
import train
from commands import InputError
from config import load_config
from config.schema import ScheduleConfig
from data.token_file import open_dataset


@pytest.fixture
def resolved(config_file):
    """(config, meta) of the tiny run, resolved."""
    config = load_config(config_file)
    meta = open_dataset(config.data.dataset).meta
    return runs.resolve(config, meta), meta


def test_defaults_follow_from_the_dataset_and_from_other_keys(resolved):
    config, _ = resolved
    assert config.model.vocab_size == 320, "257 words and a mask id, up to a multiple of 64"
    assert config.data.mask_token_id == 257
    assert config.schedule == ScheduleConfig(decay_steps=6, warmup_steps=0, min_lr=pytest.approx(3e-5))
    assert config.eval.batch_size == config.train.batch_size


def test_warm_up_is_5_percent_of_decay_rounded_down_and_a_resumed_schedule_keeps_its_shape(config_file):
    config = load_config(config_file, ["--train.max_steps=139"])
    meta = open_dataset(config.data.dataset).meta
    first = runs.resolve(config, meta)
    assert first.schedule.warmup_steps == 6
    longer = runs.resolve(replace(config, train=replace(config.train, max_steps=500)), meta, first.schedule)
    assert longer.schedule == first.schedule
    explicit = replace(config, schedule=ScheduleConfig(decay_steps=200))
    assert runs.resolve(explicit, meta, first.schedule).schedule.decay_steps == 200


def test_resolving_twice_changes_nothing(resolved):
    config, meta = resolved
    assert runs.resolve(config, meta) == config


@pytest.mark.parametrize("family, rows, needed", [("gpt2", 256, 257), ("bert", 257, 258)])
def test_too_few_rows_name_what_is_needed(resolved, family, rows, needed):
    config, meta = resolved
    config = replace(config, model=replace(config.model, name=family, vocab_size=rows))
    with pytest.raises(InputError, match=f"use at least {needed}"):
        runs.resolve(config, meta)


@pytest.mark.parametrize("family", ["gpt2", "bert", "qwen2"])
def test_only_bidirectional_models_are_masked(resolved, family):
    config, meta = resolved
    config = replace(config, model=replace(config.model, name=family))
    masking = runs.masking(config, meta, runs.build(config, meta))
    assert (masking is not None) == (family == "bert")


@pytest.fixture
def trained(config_file, tmp_path):
    out = tmp_path / "run"
    train.main([str(config_file), f"--out_dir={out}", "--head.name=cosine", "--train.max_steps=4", "--eval.interval=2", "--train.keep_last=9"])
    return out


def test_an_opened_run_says_what_the_trained_one_said(trained):
    last = [line for line in map(json.loads, (trained / "metrics.jsonl").read_text().splitlines()) if line["kind"] == "eval"][-1]
    run = runs.open_run(trained)
    assert run.step == 4 and not run.model.training
    assert run.model.head.weight is run.model.backbone.token_embedding.weight
    from data.loader import BatchShape, validation_batches
    from eval.validation import validate

    dataset = open_dataset(run.config.data.dataset)
    again = validate(run.model, validation_batches(dataset.val, BatchShape(32, 5), run.config.eval.tokens))
    assert again["val_nll"] == pytest.approx(last["val_nll"], rel=1e-6)


def test_a_run_opens_without_its_dataset(trained, tmp_path):
    text = (trained / "config.toml").read_text()
    (trained / "config.toml").write_text(text.replace(load_config(trained / "config.toml").data.dataset, "/gone"))
    assert runs.open_run(trained).meta.vocab_size == 257


def test_which_checkpoint(trained):
    assert runs.open_run(trained, "2").step == 2
    assert runs.open_run(trained, "best").step in (2, 4)
    with pytest.raises(InputError, match="no checkpoint of step 3; there are: 2, 4"):
        runs.open_run(trained, "3")
    with pytest.raises(InputError, match="last, best or a step"):
        runs.open_run(trained, "newest")


def test_the_calibrated_exponent_comes_back(trained):
    run = runs.open_run(trained)
    assert run.config.head.exponent == "auto", "the resolved config can calibrate again"
    first, last = runs.open_run(trained, "2").model.head.exponent_value, run.model.head.exponent_value
    assert first == last > 0
    assert not run.model.head.needs_calibration


@pytest.mark.parametrize("missing", ["config.toml", "run.json"])
def test_a_folder_that_is_no_run_says_what_is_missing(trained, missing):
    (trained / missing).unlink()
    with pytest.raises(InputError, match=f"not a run folder.*{missing}"):
        runs.open_run(trained)


def test_weights_of_another_shape_are_refused_by_name(trained):
    text = (trained / "config.toml").read_text()
    (trained / "config.toml").write_text(text.replace("n_embd = 32", "n_embd = 64"))
    with pytest.raises(InputError, match="another shape of"):
        runs.open_run(trained)


def test_check_resume_names_every_key_that_differs(resolved):
    config, _ = resolved
    runs.check_resume(config, replace(config, train=replace(config.train, max_steps=99, batch_size=1)), (8, 8))
    other = replace(config, seed=8, model=replace(config.model, n_layer=3))
    with pytest.raises(InputError, match="seed, model.n_layer differ"):
        runs.check_resume(other, config, (8, 8))
    other = replace(config, head=replace(config.head, name="hamming", temperature=2.0, exponent=3.0))
    with pytest.raises(InputError, match="--resume: head.name differ"):
        runs.check_resume(other, config, (8, 8))
    with pytest.raises(InputError, match="was 8 and is now 4"):
        runs.check_resume(config, config, (8, 4))


def test_initialisation_is_a_function_of_the_default_generator(resolved):
    config, meta = resolved
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(runs.build(config, meta).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_an_option_that_no_config_can_hold_says_where_to_add_it(resolved):
    config, _ = resolved
    head = torch.nn.Module()
    head.options = lambda: {"link": "harmonic", "width": 1.0}
    with pytest.raises(InputError, match="its option width is no key of HeadConfig in config/schema.py"):
        runs.record_head(config, head)
