"""`init_from`: a run of ours or a transformers checkpoint, the same head or another, other blocks and vocabularies."""

from types import SimpleNamespace

import pytest
import torch

from commands import InputError
from heads import build_head
from model import BACKBONES, build_model
from model.language_model import LanguageModel
from model.pretrained import load_pretrained
from runs import pretrained_folder


@pytest.fixture
def start(model_config):
    """start(name, source, head="linear", **model keys) -> (freshly built model, its config)."""

    def build(name, source, head="linear", options=None, **changes):
        torch.manual_seed(1)
        section = model_config(name, init_from=str(source), intermediate_size=128, **changes)
        head_module = build_head(head, section.n_embd, 90, section.vocab_size, **(options or {}))
        config = SimpleNamespace(model=section, head=SimpleNamespace(name=head))
        return LanguageModel(build_model(section), head_module, section.tie_weights).eval(), config

    return build


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_the_backbone_of_a_transformers_checkpoint_with_any_head(start, transformers_model, tmp_path, name, head):
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path)
    model, config = start(name, tmp_path, head)
    said = load(model, config)
    assert ("and head" in said) == (head == "linear" and name != "bert")  # BERT's softmax has a bias, the linear head here has none
    assert model.head.weight is model.backbone.token_embedding.weight
    tokens = torch.randint(90, (2, 16))
    expected = theirs.base_model(tokens).last_hidden_state
    actual = model.backbone.encode(tokens) if name == "bert" else model.backbone(tokens)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def load(model, config):
    return load_pretrained(model, config, pretrained_folder(config))



def test_berts_bias_comes_with_a_linear_head_that_has_one(start, transformers_model, tmp_path):
    theirs = transformers_model("bert")
    theirs.save_pretrained(tmp_path)
    model, config = start("bert", tmp_path, options={"bias": True})
    assert "backbone and head" in load(model, config)
    assert torch.equal(model.head.bias, theirs.cls.predictions.bias[:90])


def test_an_untied_linear_head_comes_along_or_takes_the_embedding(start, transformers_model, tmp_path):
    for tied in (True, False):
        theirs = transformers_model("gpt2", tied=tied)
        theirs.save_pretrained(tmp_path / str(tied))
        model, config = start("gpt2", tmp_path / str(tied), tie_weights=False)
        load(model, config)
        assert torch.equal(model.head.weight, theirs.lm_head.weight)
        assert model.head.weight is not model.backbone.token_embedding.weight


def test_a_shorter_block_crops_and_a_longer_one_is_refused(start, transformers_model, tmp_path):
    theirs = transformers_model("gpt2")
    theirs.save_pretrained(tmp_path)
    model, config = start("gpt2", tmp_path, block_size=8)
    load(model, config)
    tokens = torch.randint(90, (1, 8))
    torch.testing.assert_close(model.backbone(tokens), theirs.transformer(tokens).last_hidden_state, atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="model.block_size = 17 is longer than the 16 positions of"):
        load(*start("gpt2", tmp_path, block_size=17))


def test_rotary_positions_take_any_block(start, transformers_model, tmp_path):
    transformers_model("qwen2").save_pretrained(tmp_path)
    load(*start("qwen2", tmp_path, block_size=64))


def test_more_rows_keep_their_fresh_values_and_fewer_are_refused(start, transformers_model, tmp_path):
    theirs = transformers_model("gpt2")
    theirs.save_pretrained(tmp_path)
    model, config = start("gpt2", tmp_path, vocab_size=128)
    fresh = model.head.weight[96:].clone()
    load(model, config)
    assert torch.equal(model.head.weight[:96], theirs.lm_head.weight) and torch.equal(model.head.weight[96:], fresh)
    with pytest.raises(InputError, match="model.vocab_size = 90 is below the 96 rows of"):
        load(*start("gpt2", tmp_path, vocab_size=90))


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("bert", {}, "model.name = bert, but .* has gpt2"),
        ("gpt2", {"n_layer": 3}, "model.n_layer = 3, but .* has 2"),
        ("gpt2", {"n_embd": 64}, "model.n_embd = 64, but .* has 32"),
        ("gpt2", {"bias": False}, "model.bias = False, but .* has True"),
    ],
)
def test_a_model_of_another_shape_is_refused_with_both_values(start, transformers_model, tmp_path, name, changes, message):
    transformers_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        load(*start(name, tmp_path, **changes))


def test_another_rotary_base_is_refused(start, transformers_model, tmp_path):
    transformers_model("qwen2").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="model.rope_theta = 1000000.0, but .* has 10000.0"):
        load(*start("qwen2", tmp_path, rope_theta=1e6))


def test_a_run_of_ours_with_its_head_and_with_another(start, transformers_model, tmp_path):
    from model.hf import import_run
    from runs import open_run

    transformers_model("gpt2").save_pretrained(tmp_path / "theirs")
    import_run(str(tmp_path / "theirs"), tmp_path / "run")
    stored = open_run(tmp_path / "run").model
    for head, taken in (("linear", "backbone and head from"), ("euclidean", "backbone from")):
        model, config = start("gpt2", tmp_path / "run", head)
        assert load(model, config).startswith(taken)
        for name, parameter in stored.backbone.named_parameters():
            assert torch.equal(model.backbone.get_parameter(name), parameter)


def test_a_run_without_a_checkpoint(start, tmp_path):
    (tmp_path / "config.toml").write_text("[model]\n[head]\n", encoding="utf-8")
    with pytest.raises(InputError, match="has no checkpoint yet"):
        load(*start("gpt2", tmp_path))
