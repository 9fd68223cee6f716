import pytest
import torch
from torch.nn import functional as F

from model import build_model
from model.language_model import LanguageModel


def test_tied_prototypes_are_the_embedding_and_stay_it_after_loading(model_config, plain_head):
    model = LanguageModel(build_model(model_config("gpt2")), plain_head(32, 96))
    assert model.head.weight is model.backbone.token_embedding.weight
    other = LanguageModel(build_model(model_config("gpt2")), plain_head(32, 96))
    model.load_state_dict(other.state_dict())
    assert model.head.weight is model.backbone.token_embedding.weight
    assert torch.equal(model.head.weight, other.head.weight)
    assert sum(p is model.head.weight for p in model.parameters()) == 1


def test_untied_prototypes_are_the_heads_own(model_config, plain_head):
    head = plain_head(32, 96)
    first = head.weight.detach().clone()
    model = LanguageModel(build_model(model_config("gpt2")), head, tie_weights=False)
    assert model.head.weight is not model.backbone.token_embedding.weight
    assert torch.equal(model.head.weight, first)


def test_shapes_that_cannot_be_tied_are_named(model_config, plain_head):
    with pytest.raises(ValueError, match=r"\(90, 32\) with embeddings of shape \(96, 32\)"):
        LanguageModel(build_model(model_config("gpt2")), plain_head(32, 90))


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_causal_loss_is_the_sum_over_all_targets(model_config, plain_head, name):
    model = LanguageModel(build_model(model_config(name)), plain_head(32, 96))
    tokens, targets = torch.randint(96, (2, 9)), torch.randint(96, (2, 9))
    loss, count = model(tokens, targets)
    logits = model.backbone(tokens) @ model.head.weight.T
    assert count == 18
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))


def test_masked_loss_is_the_sum_over_the_positions(model_config, plain_head):
    model = LanguageModel(build_model(model_config("bert")), plain_head(32, 96))
    tokens, positions, targets = torch.randint(96, (2, 9)), torch.tensor([2, 8, 9, 17]), torch.randint(96, (4,))
    loss, count = model(tokens, targets, positions, label_smoothing=0.1)
    logits = (model.backbone(tokens) @ model.head.weight.T).flatten(0, 1)[positions]
    assert count == 4
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1))
