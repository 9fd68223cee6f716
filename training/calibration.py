"""What a head with an `auto` exponent or scale is calibrated on: the backbone's hidden states of the first global batch."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from training.precision import Precision


class HiddenStates:
    """Hidden states of `batches`, with dropout off, one batch at a time: iterating again computes them again, so that a long
    list of micro-batches needs the memory of one."""

    def __init__(self, backbone: nn.Module, batches: list, precision: Precision):
        self.backbone, self.batches, self.precision = backbone, batches, precision

    @torch.no_grad()
    def __iter__(self) -> Iterator[Tensor]:
        """Yields (B, T, D), or (N, D) of a masked-LM batch's scored positions; leaves the backbone in training mode."""
        self.backbone.eval()
        for batch in self.batches:
            with self.precision.autocast():
                yield self.backbone(batch.tokens, batch.positions)
        self.backbone.train()
