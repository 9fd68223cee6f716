"""The table of names: every tensor of ours is one of theirs, of the same shape, and comes back the same."""

import pytest
import torch

from commands import InputError
from model import BACKBONES, build_model
from model.hf_families import FAMILIES, family_of, require


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("bias", [True, False])
def test_names_and_shapes_are_theirs_one_to_one(model_config, transformers_model, name, bias):
    ours = build_model(model_config(name, intermediate_size=128, bias=bias)).state_dict()
    theirs = transformers_model(name).state_dict()
    given = FAMILIES[name].give(ours)
    assert {key: tensor.shape for key, tensor in given.items()} == {key: theirs[key].shape for key in given}
    rest = theirs.keys() - given.keys()
    assert rest <= {*FAMILIES[name].head.values(), "cls.predictions.decoder.bias"}


@pytest.mark.parametrize("name", BACKBONES)
def test_there_and_back_is_the_identity(model_config, randomize, name):
    ours = randomize(build_model(model_config(name))).state_dict()
    back = FAMILIES[name].take(FAMILIES[name].give(ours), ours)
    assert back.keys() == ours.keys() and all(torch.equal(back[key], ours[key]) for key in ours)


@pytest.mark.parametrize("name", BACKBONES)
def test_half_precision_files_become_float32(transformers_model, model_config, name):
    wanted = build_model(model_config(name, intermediate_size=128)).state_dict()
    taken = FAMILIES[name].take(transformers_model(name).bfloat16().state_dict(), wanted)
    assert {tensor.dtype for tensor in taken.values()} == {torch.float32}


def test_the_backbones_are_all_there():
    assert FAMILIES.keys() == BACKBONES.keys()
    assert family_of({"model_type": "bert"}) == "bert"
    with pytest.raises(InputError, match="model_type = None is none of gpt2, bert, qwen2"):
        family_of({})


def test_a_fixed_setting_may_be_absent_but_not_another():
    require({}, hidden_act=("gelu",))
    require({"hidden_act": "gelu"}, hidden_act=("gelu",))
    with pytest.raises(InputError, match="hidden_act = 'relu' is not supported, only 'gelu'"):
        require({"hidden_act": "relu"}, hidden_act=("gelu",))
