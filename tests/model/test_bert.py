"""BERT against `transformers` with the same weights, with and without padding."""

import pytest
import torch

from model import build_model
from model.hf_families import FAMILIES


@pytest.fixture
def pair(model_config, transformers_model):
    """(ours, theirs) with the same weights."""
    theirs = transformers_model("bert")
    ours = build_model(model_config("bert")).eval()
    ours.load_state_dict(FAMILIES["bert"].take(theirs.state_dict(), ours.state_dict()))
    return ours, theirs


@pytest.mark.parametrize("length", [1, 16])
def test_hidden_states_equal_transformers(pair, length):
    ours, theirs = pair
    tokens = torch.randint(96, (3, length))
    encoded = theirs.bert(tokens).last_hidden_state
    torch.testing.assert_close(ours.encode(tokens), encoded, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(tokens), theirs.cls.predictions.transform(encoded), atol=1e-5, rtol=1e-5)


def test_right_padding_and_segments_equal_transformers(pair):
    ours, theirs = pair
    tokens, segments = torch.randint(96, (3, 16)), torch.randint(2, (3, 16))
    mask = (torch.arange(16) < torch.tensor([[16], [9], [1]])).long()
    expected = theirs.cls.predictions.transform(theirs.bert(tokens, attention_mask=mask, token_type_ids=segments).last_hidden_state)
    actual = ours(tokens, attention_mask=mask, token_type_ids=segments)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)


def test_padding_changes_nothing_at_real_tokens(pair):
    ours, _ = pair
    tokens = torch.randint(96, (1, 9))
    padded = torch.cat((tokens, torch.randint(96, (1, 7))), dim=1)
    mask = torch.arange(16)[None] < 9
    torch.testing.assert_close(ours(padded, attention_mask=mask)[:, :9], ours(tokens), atol=1e-5, rtol=1e-5)


def test_a_fully_padded_row_is_finite_with_finite_gradients(pair):
    ours, _ = pair
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, :5] = True
    hidden = ours(torch.randint(96, (2, 16)), attention_mask=mask)
    assert hidden.isfinite().all()
    hidden.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


def test_positions_are_gathered_before_the_transform(pair):
    ours, _ = pair
    rows = []
    ours.transform.dense.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    ours(torch.randint(96, (4, 16)), torch.tensor([1, 17, 40]))
    assert rows == [3]


def test_first_weights_are_as_published(model_config):
    backbone = build_model(model_config("bert", n_embd=128, vocab_size=2048))
    for name, parameter in backbone.named_parameters():
        if parameter.ndim == 2:
            assert parameter.abs().max() <= 0.04
            if parameter.numel() > 10_000:
                assert parameter.std().item() == pytest.approx(0.0176, rel=0.03)  # 0.02, cut at two standard deviations
        else:
            assert parameter.eq(1 if name.endswith("norm.weight") else 0).all()


def test_110_million_parameters_without_the_pooler(model_config):
    from model.bert import Bert

    with torch.device("meta"):
        backbone = Bert(model_config("bert", n_layer=12, n_head=12, n_embd=768, block_size=512, vocab_size=30522))
    assert sum(p.numel() for p in backbone.parameters()) == 109_482_240 - 590_592 + 592_128  # BertModel - its pooler + the transform
