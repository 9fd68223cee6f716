"""What all backbones share: the registry, shapes, causality, checkpointing, bfloat16, and the errors of impossible shapes."""

import subprocess
import sys

import pytest
import torch

from model import BACKBONES, build_model
from model.language_model import LanguageModel

CAUSAL = [name for name, backbone in BACKBONES.items() if backbone.causal]


def test_the_registry_holds_the_three_families():
    assert list(BACKBONES) == ["gpt2", "bert", "qwen2"]


def test_an_unknown_name_lists_what_exists(model_config):
    with pytest.raises(ValueError, match="unknown model 'gpt3'; there are gpt2, bert, qwen2"):
        build_model(model_config("gpt3"))


def test_the_number_of_rows_must_be_known(model_config):
    with pytest.raises(ValueError, match="model.vocab_size"):
        build_model(model_config("gpt2", vocab_size=None))


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("length", [1, 7, 16])
def test_hidden_states_have_the_shape_of_the_tokens(model_config, name, length):
    backbone = build_model(model_config(name)).eval()
    tokens = torch.randint(96, (3, length))
    hidden = backbone(tokens)
    assert hidden.shape == (3, length, 32)
    positions = torch.tensor([0, 3 * length - 1])
    torch.testing.assert_close(backbone(tokens, positions), hidden.flatten(0, 1)[positions])
    assert backbone(tokens, positions[:0]).shape == (0, 32)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_sequence_beyond_block_size_is_refused(model_config, name):
    with pytest.raises(ValueError, match="17 tokens is longer than block_size=16"):
        build_model(model_config(name))(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("training", [True, False])
def test_a_later_token_changes_nothing_before_it(model_config, randomize, name, training):
    backbone = randomize(build_model(model_config(name))).train(training)
    tokens = torch.randint(96, (2, 16))
    before = backbone(tokens)
    for t in (1, 8, 15):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % 96
        after = backbone(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t:], before[:, t:])


def test_bert_sees_both_sides(model_config, randomize):
    backbone = randomize(build_model(model_config("bert"))).eval()
    tokens = torch.randint(96, (1, 16))
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 96
    assert not torch.allclose(backbone(tokens)[:, 0], backbone(changed)[:, 0])


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_is_bitwise_the_same(model_config, plain_head, name, dropout):
    model = LanguageModel(build_model(model_config(name, dropout=dropout)), plain_head(32, 96)).train()
    tokens, targets = torch.randint(96, (2, 16)), torch.randint(96, (2, 16))
    results = []
    for recompute in (False, True):
        model.backbone.activation_checkpointing = recompute
        model.zero_grad()
        torch.manual_seed(5)
        loss, _ = model(tokens, targets)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", BACKBONES)
def test_activation_checkpointing_holds_less_for_the_backward_pass(model_config, name):
    backbone = build_model(model_config(name, n_layer=6)).train()
    held = []
    for recompute in (False, True):
        backbone.activation_checkpointing = recompute
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t):
            hidden = backbone(torch.randint(96, (4, 16)))
        held.append(sum(tensor.nbytes for tensor in saved.values()))
        del hidden, saved
    assert held[1] < held[0] / 3


@pytest.mark.parametrize("name", BACKBONES)
def test_every_parameter_has_a_gradient(model_config, plain_head, name):
    model = LanguageModel(build_model(model_config(name)), plain_head(32, 96))
    loss, count = model(torch.randint(96, (4, 16)), torch.randint(96, (4, 16)))
    (loss / count).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
    # a key's bias moves every score of a query alike, so softmax does not see it; one row of segments is unused, not the whole
    assert [n for n in without if not n.endswith(("key.bias", "k_proj.bias"))] == []


@pytest.mark.parametrize("name", BACKBONES)
def test_bfloat16_weights_work(model_config, name):
    backbone = build_model(model_config(name)).eval()
    tokens = torch.randint(96, (2, 16))
    exact = backbone(tokens)
    rounded = backbone.bfloat16()(tokens)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("name", BACKBONES)
def test_heads_must_divide_the_width(model_config, name):
    with pytest.raises(ValueError, match="n_embd=15 is not divisible by n_head=2"):
        build_model(model_config(name, n_embd=15, n_head=2))


@pytest.mark.parametrize("name", BACKBONES)
def test_building_twice_from_one_seed_gives_the_same_weights(model_config, name):
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(build_model(model_config(name)).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", BACKBONES)
def test_biases_can_be_left_out(model_config, name):
    assert not [n for n, _ in build_model(model_config(name, bias=False)).named_parameters() if n.endswith("bias")]


def test_importing_loads_neither_transformers_nor_the_other_rooms():
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, model, model.hf, model.generation, model.language_model; print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert not {"transformers", "huggingface_hub", "heads", "data", "config", "training", "runs"} & set(loaded)


@pytest.mark.parametrize("name", BACKBONES)
def test_compiled_it_is_one_graph_at_any_length(name, model_config):
    torch.manual_seed(0)
    backbone = build_model(model_config(name, n_layer=1)).eval()
    compiled = torch.compile(backbone, backend="aot_eager", fullgraph=True)
    for length in (16, 7, 5):
        tokens = torch.randint(90, (2, length))
        torch.testing.assert_close(compiled(tokens), backbone(tokens), rtol=1e-4, atol=1e-5)
