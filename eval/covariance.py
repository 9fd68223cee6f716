"""The covariance of hidden states, gathered batch by batch, and what its spectrum says: effective rank and PCA shares.

Everything is float64 and O(D^2) memory, whatever the number of vectors. Mean and scatter are updated together (Chan, Golub and
LeVeque 1983) rather than as raw sums of squares: hidden states far from the origin lose no digits.
"""

from collections.abc import Callable

import numpy as np
import torch

ROWS_AT_ONCE = 8192  # bounds the float64 copy of a large batch: 8192 x 768 doubles are 50 MB
NO_VARIANCE = 1e-24  # variance over squared mean that is rounding of float64, not spread
FEW_PER_DIMENSION = 10  # fewer vectors than this per dimension measure their own number more than the spectrum


class Covariance:
    """Count, mean (D,) and scatter matrix (D, D) of a stream of vectors, mergeable over processes."""

    def __init__(self, width: int, device: torch.device | str = "cpu"):
        device = torch.device(device)
        self.device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        self.n = 0
        self.mean = torch.zeros(width, dtype=torch.float64, device=self.device)
        self.scatter = torch.zeros(width, width, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def add(self, vectors: torch.Tensor) -> None:
        """Takes in `vectors` (..., D), any dtype."""
        for rows in vectors.reshape(-1, self.mean.numel()).split(ROWS_AT_ONCE):
            if len(rows):
                rows = rows.to(self.device, torch.float64)  # (N, D)
                mean = rows.mean(dim=0)
                centred = rows - mean
                shift = mean - self.mean
                total = self.n + len(rows)
                self.scatter += centred.T @ centred + torch.outer(shift, shift) * (self.n * len(rows) / total)
                self.mean += shift * (len(rows) / total)
                self.n = total

    @torch.no_grad()
    def reduce(self, reduce: Callable[[torch.Tensor], object]) -> None:
        """Merges the processes' covariances; `reduce(tensor)` sums a tensor over processes in place. Every process must call it."""
        sums = torch.cat([self.mean * self.n, self.mean.new_tensor([self.n])])  # (D + 1,)
        reduce(sums)
        total = round(sums[-1].item())
        mean = sums[:-1] / max(total, 1)
        shift = self.mean - mean
        self.scatter += torch.outer(shift, shift) * self.n
        reduce(self.scatter)
        self.n, self.mean = total, mean

    def eigenvalues(self) -> np.ndarray | None:
        """Variances along the principal components, (D,) descending; None with fewer than two vectors, without variance, or non-finite."""
        if self.n < 2 or not bool(torch.isfinite(self.scatter).all()):
            return None
        variance = self.scatter.trace().item() / self.n
        if variance <= NO_VARIANCE * self.mean.square().sum().item():
            return None
        return torch.linalg.eigvalsh(self.scatter.cpu() / self.n).flip(0).clamp(min=0).numpy()

    def components(self, count: int) -> np.ndarray:
        """The first `count` principal directions, (count, D)."""
        return torch.linalg.eigh(self.scatter.cpu()).eigenvectors.flip(1)[:, :count].T.numpy()

    @property
    def few(self) -> bool:
        """Whether there are too few vectors for the spectrum to describe anything but their number (n < 10 D)."""
        return self.n < FEW_PER_DIMENSION * self.mean.numel()


def effective_rank(eigenvalues: np.ndarray | None) -> float | None:
    """exp of the entropy of the normalised eigenvalues: 1 (a line) to D (isotropic). Roy and Vetterli 2007."""
    if eigenvalues is None:
        return None
    shares = eigenvalues[eigenvalues > 0] / eigenvalues.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def explained_variance(eigenvalues: np.ndarray | None, count: int) -> float | None:
    """Share of the variance along the first `count` principal components, 0..1."""
    return None if eigenvalues is None else float(eigenvalues[:count].sum() / eigenvalues.sum())


def components_needed(eigenvalues: np.ndarray | None, share: float = 0.9) -> int | None:
    """How many principal components it takes to explain `share` of the variance: a count, at least 1."""
    if eigenvalues is None:
        return None
    explained = np.cumsum(eigenvalues) / eigenvalues.sum()
    return int(np.searchsorted(explained, share - 1e-12) + 1)  # a share that is met exactly may round to just below
