"""AdamW over two groups of parameters, the learning-rate schedule, and the norms of the gradient."""

import math

import torch
from torch import Tensor, nn


def build_optimizer(model: nn.Module, settings, device: torch.device) -> torch.optim.AdamW:
    """AdamW; `settings` has learning_rate, weight_decay, beta1, beta2."""
    decayed, free = split_parameters(model)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": free, "weight_decay": 0.0}]
    fused = device.type in ("cuda", "cpu", "mps")
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), fused=fused)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(with, without weight decay). Decay acts on the backbone's matrices only: decaying an embedding or a prototype
    would pull words towards the origin, which is a place in the space that distances measure, and a norm, a bias or an
    exponent has no reason to be small. A tied embedding is one parameter and stands in one group.

    Raises RuntimeError if a parameter is in no group or in two.
    """
    exempt = {id(parameter) for parameter in model.head.parameters()}
    exempt |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = dict(model.named_parameters())
    decayed = [parameter for parameter in parameters.values() if parameter.ndim >= 2 and id(parameter) not in exempt]
    free = [parameter for parameter in parameters.values() if parameter.ndim < 2 or id(parameter) in exempt]
    if sorted(map(id, decayed + free)) != sorted(map(id, parameters.values())):
        raise RuntimeError("a parameter is optimised twice or not at all")
    return decayed, free


def learning_rate(step: int, peak: float, schedule) -> float:
    """Of the update that follows `step` updates: linear warm-up to `peak`, then a cosine to `min_lr` at `decay_steps`.

    The first update's rate is above 0, and after `decay_steps` updates it stays at `min_lr`.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / (schedule.warmup_steps + 1)
    if step >= schedule.decay_steps:
        return schedule.min_lr
    progress = (step - schedule.warmup_steps) / (schedule.decay_steps - schedule.warmup_steps)
    return schedule.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - schedule.min_lr)


def gradient_norms(model: nn.Module) -> Tensor:
    """L2 norms of the gradient, on its device: (3,) = whole, head (tied prototypes included), backbone without them."""
    in_head = {id(parameter) for parameter in model.head.parameters()}
    head = [p.grad for p in model.parameters() if p.grad is not None and id(p) in in_head]
    backbone = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in in_head]
    parts = torch.stack([nn.utils.get_total_norm(head), nn.utils.get_total_norm(backbone)]).float()
    return torch.cat([torch.linalg.vector_norm(parts).unsqueeze(0), parts])
