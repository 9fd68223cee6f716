"""Every head on every backbone: one step of AdamW, a finite gradient on every parameter, and text at the end."""

import pytest
import torch

from config.schema import OptimizerConfig
from heads import HEADS, build_head
from model import BACKBONES, build_model
from model.generation import Sampling, fill_masks, generate
from model.language_model import LanguageModel
from training.optimizer import build_optimizer

OPTIONS = [(name, {}) for name in HEADS] + [
    ("linear", {"bias": True}),
    ("cosine", {"link": "gibbs", "tau": 0.1}),
    ("cosine", {"learn_exponent": True, "exponent": "sqrt_dim"}),
    ("minkowski", {"p": 1.5}),
    ("chebyshev", {"smooth": 10.0}),
    ("hamming", {"relaxation": "hard"}),
    ("hamming", {"relaxation": "gumbel"}),
    ("mahalanobis", {"covariance": "cholesky"}),
    ("mahalanobis", {"covariance": "full"}),
]
MASK = 61  # 61 words, a mask, two rows of padding


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("head, options", OPTIONS, ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())))
def test_one_step(model_section, backbone, head, options):
    torch.manual_seed(0)
    model = LanguageModel(build_model(model_section(backbone)), build_head(head, 32, MASK, 64, **options)).train()
    optimizer = build_optimizer(model, OptimizerConfig(), torch.device("cpu"))
    tokens = torch.randint(MASK, (3, 16))
    causal = model.backbone.causal
    positions = None if causal else torch.tensor([1, 20, 47])
    targets = torch.randint(MASK, (3, 16) if causal else (3,))
    loss, count = model(tokens, targets, positions)
    (loss / count).backward()
    lacking = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.isfinite().all()]
    assert lacking == [] and loss.isfinite() and count == targets.numel()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) >= len(before) - 2
    assert model.head.weight is model.backbone.token_embedding.weight

    model.eval()
    if causal:
        words = generate(model, tokens[0, :4], Sampling(20, 2, temperature=3.0))
        assert words.shape == (2, 20)
    else:
        words = fill_masks(model, torch.tensor([3, MASK, 5, MASK]), MASK, Sampling(num_samples=2, temperature=3.0))
        assert words.shape == (2, 4)
    assert words.max() < MASK


@pytest.fixture
def model_section():
    """A [model] section of one layer."""
    from config.schema import ModelConfig

    shape = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, dropout=0.1, vocab_size=64)
    return lambda name: ModelConfig(name=name, **shape, num_key_value_heads=1 if name == "qwen2" else None)
