"""Strict initialisation: every parameter is given its first value by exactly one rule, or the program stops."""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

Initializer = Callable[[Tensor], Tensor]


def normal(std: float) -> Initializer:
    """Gaussian of mean 0 and standard deviation `std`."""
    return lambda parameter: nn.init.normal_(parameter, mean=0.0, std=std)


def truncated_normal(std: float) -> Initializer:
    """Gaussian of mean 0, redrawn outside two standard deviations."""
    return lambda parameter: nn.init.trunc_normal_(parameter, mean=0.0, std=std, a=-2 * std, b=2 * std)


def zeros(parameter: Tensor) -> Tensor:
    return nn.init.zeros_(parameter)


def ones(parameter: Tensor) -> Tensor:
    return nn.init.ones_(parameter)


@torch.no_grad()
def initialize(module: nn.Module, rules: dict[str, Initializer]) -> None:
    """Fills every parameter of `module` by the one rule whose regular expression is its whole name.

    Raises ValueError naming the parameter that no rule, or more than one, would initialise.
    """
    for name, parameter in module.named_parameters():
        matching = [pattern for pattern in rules if re.fullmatch(pattern, name)]
        if len(matching) != 1:
            how = "no initialisation rule" if not matching else f"{len(matching)} initialisation rules ({', '.join(matching)})"
            raise ValueError(f"parameter {name} of {type(module).__name__} has {how}; it needs exactly one")
        rules[matching[0]](parameter)
