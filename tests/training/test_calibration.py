import torch
from torch import nn

from data.loader import Batch
from training.calibration import HiddenStates
from training.precision import Precision


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(9, 4), nn.Dropout(0.5)

    def forward(self, tokens, positions=None):
        hidden = self.dropout(self.embedding(tokens))
        return hidden if positions is None else hidden.flatten(0, 1)[positions]


def test_states_are_those_without_dropout_as_often_as_asked():
    backbone = Backbone().train()
    tokens = torch.arange(8).view(2, 4)
    batches = [Batch(tokens, tokens), Batch(tokens, tokens.flatten()[:3], torch.tensor([0, 5, 7]))]
    states = HiddenStates(backbone, batches, Precision("float32", torch.device("cpu")))
    for _ in range(2):
        causal, masked = states
        assert torch.equal(causal, backbone.embedding(tokens))
        assert torch.equal(masked, backbone.embedding(torch.tensor([0, 5, 7])))
        assert not causal.requires_grad and backbone.training
