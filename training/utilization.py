"""Model FLOPs utilization: the share of a device's peak that the model's own arithmetic uses (Chowdhery et al. 2022, PaLM, appendix B)."""

import re

import torch
from torch import nn

# Dense peak in FLOP/s of the matrix units, by words of the device's name: bfloat16 and float16, float32 without TF32. From the makers' data sheets.
PEAKS = {
    "H200": (989e12, 67e12), "H100 PCIe": (756e12, 51e12), "H100 NVL": (835e12, 60e12), "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12), "L40S": (362e12, 91.6e12), "L4": (121e12, 30.3e12), "A10": (125e12, 31.2e12), "V100": (125e12, 15.7e12),
    "RTX 4090": (165e12, 82.6e12), "RTX 3090": (71e12, 35.6e12),
}  # fmt: skip


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that `device` can reach in matrix products of `dtype`; None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = next((peaks for part, peaks in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)
    return None if known is None else known[1 if dtype is torch.float32 else 0]


def flops_per_token(model: nn.Module, config, scored: float = 1.0) -> float:
    """Forward and backward FLOPs of one input token: 6 per weight of a matrix product, 12 per layer, feature and token of
    context for attention. An embedding that is only looked up costs nothing; the head's prototypes are one product of (D) and
    (V, D), whatever the distance does beyond it, so that heads are compared by the same count. Recomputation is not counted.

    `config`: n_layer, n_embd, block_size of the [model] section. scored: the share of tokens that reach the head, and the
    transform before it where there is one (masked-LM models).
    """
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    def count(module):
        return sum(p.numel() for p in module.parameters() if p.ndim >= 2 and id(p) not in looked_up)

    transform = count(model.backbone.transform) if hasattr(model.backbone, "transform") else 0
    at_head = scored * (transform + model.head.weight.numel())
    return 6.0 * (count(model.backbone) - transform + at_head) + 12.0 * config.n_layer * config.n_embd * config.block_size
