"""What a config alone can tell to be impossible, each as one sentence that names keys and values."""

import math
from typing import Iterator

from config.schema import Config, DataConfig, ModelConfig, items

AT_LEAST_ONE = {
    "model.n_layer", "model.n_head", "model.n_embd", "model.block_size", "model.intermediate_size", "model.vocab_size",
    "model.num_key_value_heads", "schedule.decay_steps", "train.max_steps", "train.batch_size", "train.gradient_accumulation_steps",
    "train.checkpoint_interval", "train.keep_last", "eval.interval", "eval.tokens", "eval.batch_size", "emissions.interval_steps",
    "log.interval", "head.p",
}  # fmt: skip
POSITIVE = {
    "model.rope_theta", "model.rms_norm_eps", "head.tau", "head.exponent", "head.exponent_spread", "head.hidden_scale",
    "head.temperature", "head.smooth", "optimizer.learning_rate",
}  # fmt: skip
NOT_NEGATIVE = {
    "seed", "data.mask_token_id", "optimizer.weight_decay", "schedule.warmup_steps", "schedule.min_lr", "train.grad_clip",
    "head.min_denominator",
}  # fmt: skip
BELOW_ONE = {"model.dropout", "train.label_smoothing", "optimizer.beta1", "optimizer.beta2"}
MAY_BE_INFINITE = {"head.p", "train.grad_clip"}
MAX_SEED = 2**63 - 1  # what TOML's integers and torch's generators both hold


def problems(config: Config) -> Iterator[str]:
    """Yields one sentence per impossible value or combination; nothing for a config that can be built."""
    for name, value in items(config):
        if isinstance(value, int | float) and not isinstance(value, bool):
            reason = out_of_range(name, value)
            if reason:
                yield f"{name} = {value} {reason}"
    yield from contradictions(config)


def out_of_range(name: str, value: float) -> str | None:
    if math.isnan(value) or (math.isinf(value) and name not in MAY_BE_INFINITE):
        return "must be a finite number"
    if name in AT_LEAST_ONE and value < 1:
        return "must be at least 1"
    if name in POSITIVE and value <= 0:
        return "must be above 0"
    if name in NOT_NEGATIVE and value < 0:
        return "must not be negative"
    if name in BELOW_ONE and not 0 <= value < 1:
        return "must be at least 0 and below 1"
    if name == "data.mask_fraction" and not 0 < value < 1:
        return "must be above 0 and below 1"
    if name == "seed" and value > MAX_SEED:
        return f"must not exceed {MAX_SEED}"
    return None


def contradictions(config: Config) -> Iterator[str]:
    model, schedule, train = config.model, config.schedule, config.train
    if model.n_head > 0 and model.n_embd % model.n_head:
        yield f"model.n_embd = {model.n_embd} is not divisible by model.n_head = {model.n_head}"
    elif model.name == "qwen2" and model.n_head > 0 and model.n_embd // model.n_head % 2:
        yield f"model.n_embd = {model.n_embd} / model.n_head = {model.n_head} gives an odd head dimension, which rotary positions cannot pair"
    groups = model.num_key_value_heads
    if groups is not None and model.name in ("gpt2", "bert"):
        yield f"model.num_key_value_heads = {groups} has no effect on model.name = {model.name!r}; it is for qwen2"
    elif groups is not None and groups > 0 and model.n_head % groups:
        yield f"model.n_head = {model.n_head} is not divisible by model.num_key_value_heads = {groups}"
    if model.name != "qwen2":
        for key in ("rope_theta", "rms_norm_eps"):
            if getattr(model, key) != getattr(ModelConfig(), key):
                yield f"model.{key} = {getattr(model, key)} has no effect on model.name = {model.name!r}; it is for qwen2"
    if model.name != "bert" and config.data.mask_fraction != DataConfig.mask_fraction:
        yield f"data.mask_fraction = {config.data.mask_fraction} has no effect on model.name = {model.name!r}; it is for bert"
    decay_name = "train.max_steps" if schedule.decay_steps is None else "schedule.decay_steps"
    decay = train.max_steps if schedule.decay_steps is None else schedule.decay_steps
    if schedule.warmup_steps is not None and schedule.warmup_steps > decay:
        yield f"schedule.warmup_steps = {schedule.warmup_steps} exceeds {decay_name} = {decay}"
    if schedule.min_lr is not None and schedule.min_lr > config.optimizer.learning_rate:
        yield f"schedule.min_lr = {schedule.min_lr} exceeds optimizer.learning_rate = {config.optimizer.learning_rate}"
    if train.parallel == "fsdp":
        yield "train.parallel = 'fsdp' is not built yet; 'ddp' is what exists"
    country = config.emissions.country_iso_code
    if country is not None and not (len(country) == 3 and country.isascii() and country.isupper()):
        yield f"emissions.country_iso_code = {country!r} is not a code of three capital letters, such as FRA"
    if config.out_dir is not None and not config.out_dir.strip():
        yield f"out_dir = {config.out_dir!r} is empty; name a folder, or leave it out"
