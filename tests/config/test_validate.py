"""What a config alone shows to be impossible: one sentence, with keys and values in it."""

import pytest

from commands import InputError
from config import load_config

BASE = '[data]\ndataset = "data/x"\n'


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model.n_embd=15", "--model.n_head=2"], ["model.n_embd = 15", "model.n_head = 2"]),
        (["--model.name=qwen2", "--model.n_head=4", "--model.num_key_value_heads=3"], ["model.n_head = 4", "model.num_key_value_heads = 3"]),
        (["--model.name=qwen2", "--model.n_embd=12", "--model.n_head=4"], ["model.n_embd = 12", "model.n_head = 4", "odd"]),
        (["--model.num_key_value_heads=2"], ["model.num_key_value_heads = 2", "gpt2"]),
        (["--model.n_head=0"], ["model.n_head = 0"]),
        (["--model.vocab_size=0"], ["model.vocab_size = 0"]),
        (["--train.batch_size=0"], ["train.batch_size = 0"]),
        (["--train.batch_size=-4"], ["train.batch_size = -4"]),
        (["--train.gradient_accumulation_steps=0"], ["train.gradient_accumulation_steps = 0"]),
        (["--model.block_size=-1"], ["model.block_size = -1"]),
        (["--eval.tokens=0"], ["eval.tokens = 0"]),
        (["--eval.interval=0"], ["eval.interval = 0"]),
        (["--emissions.interval_steps=0"], ["emissions.interval_steps = 0"]),
        (["--model.dropout=1"], ["model.dropout = 1.0"]),
        (["--model.dropout=-0.1"], ["model.dropout = -0.1"]),
        (["--train.label_smoothing=1.5"], ["train.label_smoothing = 1.5"]),
        (["--data.mask_fraction=0"], ["data.mask_fraction = 0.0"]),
        (["--data.mask_fraction=1"], ["data.mask_fraction = 1.0"]),
        (["--data.mask_fraction=0.3"], ["data.mask_fraction = 0.3", "gpt2"]),
        (["--optimizer.learning_rate=0"], ["optimizer.learning_rate = 0.0"]),
        (["--optimizer.learning_rate=nan"], ["optimizer.learning_rate = nan"]),
        (["--optimizer.learning_rate=inf"], ["optimizer.learning_rate = inf"]),
        (["--optimizer.beta2=1"], ["optimizer.beta2 = 1.0"]),
        (["--head.p=0.5"], ["head.p = 0.5"]),
        (["--head.exponent=-3"], ["head.exponent = -3.0"]),
        (["--head.tau=0"], ["head.tau = 0.0"]),
        (["--schedule.warmup_steps=11", "--schedule.decay_steps=10"], ["schedule.warmup_steps = 11", "schedule.decay_steps = 10"]),
        (["--schedule.warmup_steps=11", "--train.max_steps=10"], ["schedule.warmup_steps = 11", "train.max_steps = 10"]),
        (["--schedule.min_lr=1", "--optimizer.learning_rate=0.1"], ["schedule.min_lr = 1.0", "optimizer.learning_rate = 0.1"]),
        (["--train.parallel=fsdp"], ["train.parallel = 'fsdp'", "ddp"]),
        (["--emissions.country_iso_code=France"], ["emissions.country_iso_code = 'France'"]),
        (["--seed=-1"], ["seed = -1"]),
        (["--seed=9223372036854775808"], ["seed = 9223372036854775808"]),
        (["--out_dir="], ["out_dir = ''"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_impossible_values_are_refused_by_name(tmp_path, flags, named):
    path = tmp_path / "x.toml"
    path.write_text(BASE, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_config(path, flags)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("--")
    assert all(part in message for part in named), message


def test_the_file_is_named_where_the_file_is_to_blame(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(BASE + "[model]\nn_head = 5\n", encoding="utf-8")
    with pytest.raises(InputError, match="x.toml: model.n_embd = 768 is not divisible by model.n_head = 5"):
        load_config(path)


@pytest.mark.parametrize(
    "flag",
    ["--head.p=1", "--head.p=inf", "--train.grad_clip=0", "--model.dropout=0", "--schedule.warmup_steps=0", "--optimizer.beta1=0", "--seed=0",
     "--schedule.warmup_steps=10000", "--data.mask_token_id=0", "--train.label_smoothing=0"],
)  # fmt: skip
def test_values_at_the_edge_are_allowed(tmp_path, flag):
    path = tmp_path / "x.toml"
    path.write_text(BASE, encoding="utf-8")
    load_config(path, [flag])
