"""Pairwise kernels without an inner product: sums of phi(x_i, y_i) and maxima over i, in tiles.

Each kernel states its formula once, as plain broadcasting: `value` reduces (n, 1, D) against (1, m, D) to (n, m), `slope` is the derivative
of that value in its first argument. All are symmetric, u(x, y) = u(y, x), so the derivative in the second argument is `slope` with the
arguments swapped. torch.compile fuses both into loops that hold nothing of size n x m x D; until it pays, and where it does not work,
the same formulas run on tiles small enough to stay in cache. `|x|` has derivative 0 at 0.

Distances: arXiv 2603.10225, section 3.1.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from heads.kernels import Kernel
from heads.kernels.fusing import fused

FUSE_FROM = 2**24  # elements n * m * D of one call: below, plain formulas take milliseconds and compiling takes seconds


class Tile(NamedTuple):
    """How much one step handles: `rows` of x against as many rows of y as hold `elements` numbers together (unfused: n * m * D of them)."""

    rows: int
    elements: int


# On a CPU a tile of y (512 KiB) stays in a core's L2 cache; on CUDA rows * elements stays below 2^31, beyond which the generated code counts
# in 64 bits and is compiled again. Unfused, intermediates take 2 MiB each.
FUSED_TILE = {"cpu": Tile(128, 2**17), "cuda": Tile(1024, 2**20)}
PLAIN_TILE = {"cpu": Tile(16, 2**19), "cuda": Tile(64, 2**23)}


@dataclass(frozen=True)
class TileKernel(Kernel):
    """A symmetric pairwise function of rows, evaluated tile by tile. Subclasses are frozen dataclasses with `value` and `slope`."""

    def value(self, a, b):
        """(n, 1, D), (1, m, D) -> (n, m)."""
        raise NotImplementedError

    def slope(self, a, b, u):
        """d value / d a, elementwise: a, b broadcast to (n, m, D); u (n, m, 1) is the value. Up to what `share` divides by."""
        raise NotImplementedError

    def share(self, a, b, u, grad_u):
        """grad_u (n, m, 1), divided by what the slopes of a pair have in common (their number, their sum), if anything."""
        return grad_u

    @torch.no_grad()
    def pairwise(self, x, y):
        """u(x_i, y_k) for all pairs: x (n, D), y (m, D) -> (n, m), float32, or float64 if x is. Works in a few MiB beside the result."""
        wide = torch.promote_types(x.dtype, torch.float32)
        u = x.new_empty(len(x), len(y), dtype=wide)
        with torch.autocast(x.device.type, enabled=False):
            step, tiles = _plan(_values, self, x, y, pair_arguments=0)
            for rows, columns in tiles:
                u[rows, columns] = step(self, *_tiles_of(wide, x[rows], y[columns]))
        return u

    @torch.no_grad()
    def backward(self, x, y, u, grad_u, grad_x, grad_y):
        """Adds the gradient of sum(grad_u * u) to the buffers grad_x (n, D) and grad_y (m, D), float32 or float64, in place.

        x, y, u: as given to and returned by `pairwise`, though values of u may have been raised to a floor; grad_u (n, m).
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            step, tiles = _plan(_gradients, self, x, y, pair_arguments=2)
            for rows, columns in tiles:
                # + 0 turns -0 into 0, whose sign `_sign` knows.
                at_x, at_y = step(self, *_tiles_of(wide, x[rows] + 0, y[columns] + 0, u[rows, columns], grad_u[rows, columns]))
                grad_x[rows] += at_x
                grad_y[columns] += at_y


def _values(kernel, a, b):
    return kernel.value(a[:, None], b[None])


def _gradients(kernel, a, b, u, grad_u):
    a, b, u, grad_u = a[:, None], b[None], u[..., None], grad_u[..., None]  # (n, 1, D), (1, m, D), (n, m, 1), (n, m, 1)
    grad_u = kernel.share(a, b, u, grad_u)
    return (grad_u * kernel.slope(a, b, u)).sum(1), (grad_u * kernel.slope(b, a, u)).sum(0)


def _tiles_of(dtype, *parts):
    return [part.detach().to(dtype).contiguous() for part in parts]


def _plan(formula, kernel, x, y, pair_arguments):
    """The function to run per tile (fused where that pays and works) and the (rows, columns) slices to run it on."""
    n, m, width = len(x), len(y), x.shape[1]
    step = fused(formula, kernel, x, pair_arguments) if n * m * width >= FUSE_FROM else None
    if step is not None:
        tile = FUSED_TILE[x.device.type]
        columns = tile.elements // width
    else:
        step, tile = formula, PLAIN_TILE.get(x.device.type, PLAIN_TILE["cuda"])
        columns = tile.elements // max(1, min(n, tile.rows) * width)
    return step, [(at_x, at_y) for at_y in _slices(m, columns) for at_x in _slices(n, tile.rows)]


def _slices(total, step):
    """Slices of nearly equal length, at most `step`, that cover range(total): a tail of length 1 would have to be compiled by itself."""
    count = -(-total // max(1, step))
    return [slice(total * i // count, total * (i + 1) // count) for i in range(count)]


@dataclass(frozen=True)
class PowerSum(TileKernel):
    """sum_i |x_i - y_i|^p, p >= 1.

    The sum itself must fit its dtype: in float32 rows with |x|^p near 3e38 or 1e-38 need a common rescaling first, and large p PowerNorm.
    """

    p: float

    @property
    def power(self):
        return self.p

    def value(self, a, b):
        return _power((a - b).abs(), self.p).sum(-1)

    def slope(self, a, b, u):
        difference = a - b
        if self.p == 1:
            return _sign(difference)
        if self.p < 2:
            return self.p * _power(difference.abs(), self.p - 1) * _sign(difference)
        return self.p * _power(difference.abs(), self.p - 2) * difference  # cheaper than with a sign


@dataclass(frozen=True)
class PowerNorm(TileKernel):
    """(sum_i |x_i - y_i|^p)^(1/p), for p so large that a sum of powers would not fit: those of the ratios to the largest difference do."""

    p: float

    def value(self, a, b):
        t = (a - b).abs()
        largest = t.amax(-1, keepdim=True)
        ratios = t / largest.clamp(min=torch.finfo(t.dtype).tiny)
        return largest[..., 0] * _power(ratios, self.p).sum(-1).pow(1 / self.p)

    def slope(self, a, b, u):
        difference = a - b
        return _power(difference.abs() / u.clamp(min=torch.finfo(u.dtype).tiny), self.p - 1) * _sign(difference)


@dataclass(frozen=True)
class Canberra(TileKernel):
    """sum_i |x_i - y_i| / max(|x_i| + |y_i| + eps, min_denominator); a floored denominator is constant."""

    eps: float = 1e-12
    min_denominator: float = 0.0

    def value(self, a, b):
        return ((a - b).abs() / self._floored(a.abs() + b.abs() + self.eps)).sum(-1)

    def slope(self, a, b, u):
        difference, denominator = a - b, a.abs() + b.abs() + self.eps
        floored = self._floored(denominator)
        # d/da (t / s) = (sign(a - b) - (t / s) sign(a)) / s: no square of s, which overflows long before s does.
        ratio = difference.abs() / floored
        if self.min_denominator > 0:
            ratio = torch.where(denominator > self.min_denominator, ratio, 0.0)
        return (_sign(difference) - ratio * _sign(a)) / floored

    def _floored(self, denominator):
        return denominator.clamp(min=self.min_denominator) if self.min_denominator > 0 else denominator


@dataclass(frozen=True)
class Maximum(TileKernel):
    """max_i |x_i - y_i|. Coordinates that tie for the maximum share its gradient equally."""

    def value(self, a, b):
        return (a - b).abs().amax(-1)

    def slope(self, a, b, u):
        difference = a - b
        return torch.where(difference.abs() >= u, _sign(difference), 0.0)

    def share(self, a, b, u, grad_u):
        return grad_u / ((a - b).abs() >= u).sum(-1, keepdim=True, dtype=u.dtype).clamp(min=1)  # none reaches a u that was raised to a floor


@dataclass(frozen=True)
class SmoothMaximum(TileKernel):
    """(ln sum_i exp(alpha |x_i - y_i|) - ln D) / alpha, alpha > 0: between the mean and the maximum of |x_i - y_i|, and exactly 0 at x = y."""

    alpha: float

    def value(self, a, b):
        t = (a - b).abs()
        largest = t.amax(-1, keepdim=True)
        # expm1 and log1p: where alpha * t is small the exponentials are all nearly 1, and their logarithm would keep no digits.
        return largest[..., 0] + (self.alpha * (t - largest)).expm1().mean(-1).log1p() / self.alpha

    def slope(self, a, b, u):
        difference = a - b
        return self._weight(difference, u) * _sign(difference)

    def share(self, a, b, u, grad_u):
        # A softmax, however much of ln D the rounding of u has lost; the weights vanish where u was raised to a floor.
        return grad_u / self._weight(a - b, u).sum(-1, keepdim=True).clamp(min=1e-30)

    def _weight(self, difference, u):
        return (self.alpha * (difference.abs() - u)).exp()


def _power(t, exponent):
    """t ** exponent, t >= 0. Small multiples of 1/2 take multiplications and one square root, others half the time of a general power."""
    whole = int(exponent)
    if exponent - whole not in (0, 0.5) or whole > 8:
        return (exponent * t.log()).exp()
    return math.prod([t] * whole + [t.sqrt()] * (exponent > whole))


def _sign(t):
    """sign(t), for t other than -0: the bits of a float, read as an integer, have its sign. In the C++ loops half the time of t.sign()."""
    return t.view(torch.int64 if t.dtype == torch.float64 else torch.int32).clamp(-1, 1).to(t.dtype)
