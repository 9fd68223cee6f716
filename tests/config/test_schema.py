"""The schema: what every key says of itself, comparison, and what a resumed run may change."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from config.schema import KEYS, MAY_CHANGE_ON_RESUME, SECTIONS, Config, DataConfig, TrainConfig, differences, items


def test_every_key_says_what_it_means():
    assert len(KEYS) == 2 + sum(len(fields(cls)) for cls in SECTIONS.values())
    for name, entry in KEYS.items():
        meaning = entry.metadata["help"]
        assert len(meaning.split()) >= 2 and "\n" not in meaning, name


def test_a_config_cannot_be_changed_in_place():
    config = Config(DataConfig("data/x"))
    with pytest.raises(FrozenInstanceError):
        config.train.max_steps = 3


def test_items_reach_every_key_in_the_order_of_the_schema():
    config = Config(DataConfig("data/x"), seed=7, train=TrainConfig(max_steps=3))
    values = dict(items(config))
    assert list(values) == list(KEYS)
    assert (values["seed"], values["data.dataset"], values["train.max_steps"]) == (7, "data/x", 3)


def test_differences_name_section_and_key():
    a = Config(DataConfig("data/x"))
    assert differences(a, replace(a)) == []
    b = replace(a, seed=2, data=DataConfig("data/y", mask_token_id=0), train=TrainConfig(batch_size=8))
    assert differences(a, b) == differences(b, a) == ["seed", "data.dataset", "data.mask_token_id", "train.batch_size"]


def test_resuming_may_change_how_long_and_how_often_but_not_what_is_learned():
    assert MAY_CHANGE_ON_RESUME <= set(KEYS)
    assert {name for name in KEYS if name.endswith(("interval", "interval_steps"))} <= MAY_CHANGE_ON_RESUME
    assert not {name for name in MAY_CHANGE_ON_RESUME if name.startswith(("data.", "model.", "head.", "optimizer.", "schedule."))}
    assert not MAY_CHANGE_ON_RESUME & {"seed", "train.precision", "train.grad_clip", "train.label_smoothing", "eval.tokens"}
