import math

import torch
from torch import nn

from heads.distance_head import DistanceHead, Geometry
from heads.kernels.inner_product import SquaredDistance

RIDGE = 1e-3  # lambda of covariance "full": the smallest eigenvalue of M


class Mahalanobis(DistanceHead):
    """sqrt((h - w)^T M (h - w)), M = Sigma^-1 learned, positive definite by construction and I at the start.

    covariance "diagonal": M = diag exp(a); "cholesky": M = L L^T, L lower triangular with diagonal exp(l); "full": M = A A^T + 1e-3 I.
    """

    defaults = DistanceHead.defaults | {"covariance": "diagonal"}

    def build_geometry(self):
        covariance, D = self.settings["covariance"], self.n_embd
        if covariance == "diagonal":
            self.log_precision = nn.Parameter(torch.empty(D))
        elif covariance == "cholesky":
            self.log_diagonal = nn.Parameter(torch.empty(D))
            self.lower = nn.Parameter(torch.empty(D, D))  # strictly lower triangular; the rest is unused and stays 0
        elif covariance == "full":
            self.factor = nn.Parameter(torch.empty(D, D))
        else:
            raise ValueError(f"covariance {covariance!r}: must be diagonal, cholesky or full")
        return Geometry(SquaredDistance(), metric_norm, root=0.5)

    @torch.no_grad()
    def reset_parameters(self):
        super().reset_parameters()
        covariance = self.settings["covariance"]
        if covariance == "diagonal":
            nn.init.zeros_(self.log_precision)
        elif covariance == "cholesky":
            nn.init.zeros_(self.log_diagonal)
            nn.init.zeros_(self.lower)
        else:
            nn.init.eye_(self.factor).mul_(math.sqrt(1 - RIDGE))

    def metric(self):
        """M (D, D), or its diagonal (D,)."""
        covariance = self.settings["covariance"]
        if covariance == "diagonal":
            return self.log_precision.exp()
        if covariance == "cholesky":
            factor = self.lower.tril(-1) + self.log_diagonal.exp().diag()
            return factor @ factor.t()
        return self.factor @ self.factor.t() + RIDGE * torch.eye(self.n_embd, dtype=self.factor.dtype, device=self.factor.device)

    def definition(self, h, w):
        difference, metric = h[:, None] - w, self.metric()  # (N, V, D)
        towards = difference * metric if metric.dim() == 1 else difference @ metric
        return (difference * towards).sum(-1).sqrt()


def metric_norm(rows, metric):
    """sqrt(x^T M x) of rows (n, D) -> (n,)."""
    parts = rows.split(4096)  # so that little is held beside V rows
    return torch.cat([torch.linalg.vecdot(part, part * metric if metric.dim() == 1 else part @ metric) for part in parts]).sqrt()
