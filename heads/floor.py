"""The floor of a distance: d >= 1e-6 (||h|| + ||w||), in the distance's own norm, so that ln d and its gradient stay finite."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RELATIVE = 1e-6
# Between two zero vectors any positive floor will do.
SMALLEST = {torch.float32: 1e-36, torch.float64: 1e-300}


@dataclass(frozen=True)
class Floor:
    """u is floored at (1e-6 (norm(x) + norm(y)))^power; at the floor the gradient is 0.

    norm: rows (n, D), and the kernel's parameter if it has one -> (n,).
    """

    norm: Callable[..., Tensor]
    power: float = 1.0

    def apply(self, u: Tensor, norm_x: Tensor, norm_y: Callable[[], Tensor]) -> tuple[Tensor, Tensor] | None:
        """Floors u (n, V) in place; returns (indices of rows with floored values, their mask (len, V)), or None if there are none.

        norm_x: norms of the rows x (n,); norm_y: gives those of y (V,) where they are needed.
        By the triangle inequality d < 1e-6 (||x|| + ||y||) only if d < 2.1e-6 ||x||: other rows are passed over.
        """
        index = (u.amin(1) <= self.limit(3 * norm_x)).nonzero()[:, 0]
        if len(index) == 0:
            return None
        limit = self.limit(norm_x[index, None] + norm_y())
        mask = u[index] <= limit
        u[index] = torch.where(mask, limit, u[index])
        return index, mask

    def limit(self, norm: Tensor) -> Tensor:
        return (RELATIVE * norm).pow(self.power).clamp(min=SMALLEST[norm.dtype])
