"""Logistic noise as a function of (seed, position): drawing it again gives the same numbers, on any device and in any chunks."""

import torch
from torch import Tensor

BLOCK_ELEMENTS = 2**18  # the counters of one block, int64, take 2 MiB


def logistic_noise(rows: Tensor, seed: int) -> Tensor:
    """Independent standard logistic noise ln u - ln(1 - u), of the shape and dtype of rows (n, D); seed below 2^31."""
    noise = torch.empty(rows.numel(), dtype=rows.dtype, device=rows.device)
    for start in range(0, len(noise), BLOCK_ELEMENTS):
        part = noise[start : start + BLOCK_ELEMENTS]
        counter = torch.arange(start, start + len(part), device=rows.device)
        u = (_hash(_hash(counter & 0xFFFFFFFF) ^ _hash((counter >> 32) + seed + 1)) >> 8).to(rows.dtype)
        u = (u + 0.5) * 2.0**-24  # 2^24 values strictly between 0 and 1
        part.copy_(u.log() - (-u).log1p())
    return noise.view_as(rows)


def _hash(x: Tensor) -> Tensor:
    """Mixes 32-bit integers held in int64 (Wellons' lowbias32 constants)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)
