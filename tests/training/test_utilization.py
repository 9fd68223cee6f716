from types import SimpleNamespace

import pytest
import torch
from torch import nn

from training.utilization import flops_per_token, peak_flops


class Model(nn.Module):
    """An embedding tied to the head, one square matrix, a norm."""

    def __init__(self, tied):
        super().__init__()
        self.backbone = nn.ModuleDict({"wte": nn.Embedding(10, 4), "up": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.backbone["wte"].weight


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_count_six_per_weight_and_an_embedding_counts_as_the_head_only(tied):
    shape = SimpleNamespace(n_layer=2, n_embd=4, block_size=8)
    assert flops_per_token(Model(tied), shape) == 6 * (16 + 40) + 12 * 2 * 4 * 8


def test_gpt2_small_has_its_known_cost():
    """0.86 GFLOP per token: 6 x 124 M parameters (the tied embedding as the head) and attention over 1,024 tokens."""
    from model import build_model

    shape = SimpleNamespace(
        name="gpt2", n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, intermediate_size=None, dropout=0.0, bias=True
    )
    model = nn.Module()
    model.backbone = build_model(shape)
    model.head = nn.Module()
    model.head.weight = model.backbone.token_embedding.weight
    assert flops_per_token(model, shape) == pytest.approx(6 * 123.5e6 + 12 * 12 * 768 * 1024, rel=0.01)


def test_bert_pays_for_its_transform_and_head_at_masked_positions_only():
    from model import build_model

    shape = SimpleNamespace(
        name="bert", n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=100, intermediate_size=None, dropout=0.0, bias=True
    )
    model = nn.Module()
    model.backbone = build_model(shape)
    model.head = nn.Linear(16, 100, bias=False)
    everywhere = 6 * 2 * (4 * 16 * 16 + 2 * 4 * 16 * 16) + 12 * 2 * 16 * 32
    for scored in (1.0, 0.15):
        assert flops_per_token(model, shape, scored) == pytest.approx(everywhere + scored * 6 * (16 * 16 + 100 * 16))


def test_the_peak_is_known_by_name_and_unknown_for_a_cpu(monkeypatch):
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
    for name, low, full in (("NVIDIA H100 80GB HBM3", 989e12, 67e12), ("NVIDIA H100 PCIe", 756e12, 51e12), ("NVIDIA L4", 121e12, 30.3e12),
                            ("NVIDIA L40", None, None), ("NVIDIA RTX A1000", None, None), ("Quadro K620", None, None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda", 0), torch.bfloat16) == low
        assert peak_flops(torch.device("cuda", 0), torch.float32) == full
