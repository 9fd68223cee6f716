"""Kernels that are matrix products: x . y, ||x - y||^2 under a metric, and 1 - cos(x, y).

A chunk costs three products: x Y^T forward, and backward G Y and G^T x with G the gradient of the chunk's values. Everything that is
one number per prototype (its norm, its column of G summed) is prepared or finished once for all chunks.
The forward product has a float32 result whatever autocast says, because the exponent of a harmonic head multiplies its rounding; the
backward products are taken in the autocast dtype (float16 has too little range for G: float32 there).
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.kernels import Buffer, Kernel, Pairs, widest

# Where a difference of large numbers has lost more than this factor to cancellation, it is recomputed from the rows themselves.
CANCELLED = 0.03
BLOCK_ELEMENTS = 2**19  # numbers held at once by work that goes over rows in blocks: 2 MiB


@dataclass(frozen=True)
class InnerProductKernel(Kernel):
    """What the three kernels share: alone, without chunks, they are bound once and used once."""

    is_product = True

    def pairwise(self, x, y):
        return self.bound(x, y)[1]

    def bound(self, x, y):
        pairs = self.bind(y, dtype=x.dtype)
        u = pairs.values(x)
        pairs.complete(u, x, 0)
        return pairs, u

    def backward(self, x, y, u, grad_u, grad_x, grad_y):
        pairs, _ = self.bound(x, y)
        mine = torch.zeros_like(grad_y)
        pairs.backward(x, u, grad_u.clone(), grad_u.new_ones(len(x), 1), (grad_x, mine))
        pairs.finish(mine)
        grad_y += mine


@dataclass(frozen=True)
class Dot(InnerProductKernel):
    """u = x . y (+ bias of y; parameter: bias (V,))."""

    def bind(self, y, parameter=None, dtype=None):
        return DotPairs(y, parameter, dtype)


@dataclass(frozen=True)
class SquaredDistance(InnerProductKernel):
    """u = (x - y)^T M (x - y); parameter: the metric M, symmetric (D, D), or its diagonal (D,); without one M is the identity."""

    power = 2.0

    def bind(self, y, parameter=None, dtype=None):
        return SquaredDistancePairs(y, parameter, dtype)


@dataclass(frozen=True)
class CosineDistance(InnerProductKernel):
    """u = 1 - x . y / (|x| |y|), which is half the squared distance of the normalised rows; 1, with gradient 0, for a zero row."""

    power = 2.0
    scale_free = True

    def bind(self, y, parameter=None, dtype=None):
        if parameter is not None:
            return super().bind(y, parameter)
        return CosinePairs(y, parameter, dtype)


class Products:
    """The three matrix products of chunks of rows x (n, D) with the prototypes y (V, D), in y's own dtype. G is (n, V)."""

    rounds_operands = False  # whether the forward product rounds x and y

    def __init__(self, y: Tensor):
        self.y = y
        self.buffer = Buffer(y)

    def forward(self, x: Tensor) -> Tensor:
        """x Y^T (n, V), in a buffer that the next call may reuse."""
        return torch.mm(x, self.y.t(), out=self.buffer.shaped(len(x), len(self.y)))

    def grad_x(self, G: Tensor) -> Tensor:
        """G Y (n, D)."""
        return torch.mm(G, self.y)

    def add_grad_y(self, G: Tensor, x: Tensor, grad_y: Tensor, beta: int) -> None:
        """grad_y (V, D) becomes beta * grad_y + G^T x; with beta 0 it need not be initialised."""
        grad_y.addmm_(G.t(), x, beta=beta)


class OneDnnBfloat16(Products):
    """On a CPU torch.mm rounds the result of bfloat16 operands: sums that have to stay float32 are asked of oneDNN."""

    rounds_operands = True

    def __init__(self, y):
        super().__init__(y)
        self.low = y.bfloat16()
        self.low_buffer = Buffer(self.low)

    def forward(self, x):
        with bfloat16_operands():
            return super().forward(x)

    def grad_x(self, G):
        return torch.mm(self.low_buffer.shaped(*G.shape).copy_(G), self.low).to(G.dtype)

    def add_grad_y(self, G, x, grad_y, beta):
        with bfloat16_operands():
            super().add_grad_y(G, x, grad_y, beta)


class TensorCores(Products):
    """On CUDA: operands in `dtype`, results in float32; the backward products of float16 stay float32, as its range is too small for G."""

    rounds_operands = True

    def __init__(self, y, dtype):
        super().__init__(y)
        self.low = y.to(dtype)

    def forward(self, x):
        return torch.mm(x.to(self.low.dtype), self.low.t(), out_dtype=torch.float32)

    def grad_x(self, G):
        if self.low.dtype == torch.float16:
            return super().grad_x(G)
        return torch.mm(G.to(self.low.dtype), self.low).to(G.dtype)

    def add_grad_y(self, G, x, grad_y, beta):
        if self.low.dtype == torch.float16:
            return super().add_grad_y(G, x, grad_y, beta)
        product = torch.mm(G.to(self.low.dtype).t(), x.to(self.low.dtype), out_dtype=torch.float32)
        return grad_y.add_(product) if beta else grad_y.copy_(product)


@contextlib.contextmanager
def bfloat16_operands():
    """Within it, oneDNN may round the operands of float32 products on a CPU to bfloat16; sums and results stay float32.

    It does so on processors with matrix units for it (AMX), as CUDA's tensor cores do; on others its own float32 product is used.
    """
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def choose_products(y: Tensor, dtype) -> Products:
    """For prototypes y (V, D), float32 or float64, where products may be taken in `dtype`."""
    low = y.dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16)
    if low and y.is_cuda:
        return TensorCores(y, dtype)
    return OneDnnBfloat16(y) if low and dtype == torch.bfloat16 else Products(y)


class InnerProductPairs(Pairs):
    """Products with the prototypes y (V, D), and the sums over all tokens that `finish` needs."""

    def __init__(self, y: Tensor, parameter: Tensor | None, dtype):
        self.parameter = parameter
        self.y = y if y.dtype == torch.float64 else y.float()
        self.products = choose_products(self.y, dtype)
        self.overwrite = False
        self.columns = self.y.new_zeros(len(y))  # (V,) sums of G over the tokens

    def gradient_buffer(self, y, will_be_written):
        if not will_be_written:
            return torch.zeros_like(y)
        buffer = torch.empty_like(y)  # the first product overwrites it: zeros need not be written and read again
        buffer[len(self.y) :] = 0
        self.overwrite = True
        return buffer

    def pull(self, grad: Tensor, x: Tensor, grad_y: Tensor) -> Tensor:
        """Adds grad^T x to grad_y and returns grad Y (n, D), for grad (n, V). Must come before anything else is added to grad_y."""
        self.products.add_grad_y(grad, x, grad_y, beta=0 if self.overwrite else 1)
        self.overwrite = False
        return self.products.grad_x(grad)


class DotPairs(InnerProductPairs):
    def values(self, x):
        return self.products.forward(x)

    def complete(self, u, x, first):
        if self.parameter is not None:
            u[:, : len(self.parameter)] += self.parameter

    def backward(self, x, u, grad_u, weights, grads):
        grad_x, grad_y = grads
        if self.parameter is not None:
            self.columns += torch.mv(grad_u.t(), weights[:, 0])
        grad_x += self.pull(grad_u, x * weights, grad_y).mul_(weights)

    def finish(self, grad_y):
        return None if self.parameter is None else self.columns[: len(self.parameter)]


class SquaredDistancePairs(InnerProductPairs):
    def __init__(self, y, parameter, dtype):
        super().__init__(y, parameter, dtype)
        self.squares = self.square(self.y)  # (V,)
        self.largest = self.squares.amax()
        self.grad_metric = None if parameter is None else torch.zeros_like(parameter)

    def apply(self, rows: Tensor) -> Tensor:
        """rows (n, D) times the metric."""
        if self.parameter is None:
            return rows
        return rows * self.parameter if self.parameter.dim() == 1 else rows @ self.parameter

    def square(self, rows: Tensor) -> Tensor:
        """(n, D) -> (n,), x^T M x."""
        if self.parameter is None:
            return torch.linalg.vector_norm(rows, dim=1).square_()
        return torch.cat([torch.linalg.vecdot(part, self.apply(part)) for part in blocks(rows)])

    def metric_gradient(self, left: Tensor, right: Tensor) -> None:
        """Adds sum_i left_i right_i^T, or its diagonal, to the metric's gradient; only its symmetric part matters."""
        if self.parameter is not None:
            self.grad_metric += (left * right).sum(0) if self.parameter.dim() == 1 else left.t() @ right

    def values(self, x):
        self.close = []
        return self.products.forward(self.apply(x).mul(-2))

    def complete(self, u, x, first):
        x_squares = self.square(x)[:, None]  # (n, 1)
        u.add_(self.squares).add_(x_squares)
        for i, k in cancelled(u, CANCELLED * (x_squares + self.largest), lambda rows: CANCELLED * (x_squares[rows] + self.squares)):
            u[i, k] = self.square(x[i] - self.y[k])
            self.close.append((i + first, k))

    def backward(self, x, u, grad_u, weights, grads):
        grad_x, grad_y = grads
        close = [(i, k, grad_u[i, k][:, None] * weights[i]) for i, k in self.close]
        for i, k, _ in close:
            grad_u[i, k] = 0
        self.columns += torch.mv(grad_u.t(), weights[:, 0])
        towards = self.pull(grad_u, self.apply(x) * (-2 * weights), grad_y).mul_(weights)  # (n, D)
        weighted = x * (grad_u.sum(1, keepdim=True) * weights)
        self.metric_gradient(x, weighted - 2 * towards)
        grad_x.add_(self.apply(weighted - towards), alpha=2)
        for i, k, grad in close:  # differences taken before they are multiplied by a G that is large where they are small
            difference = x[i] - self.y[k]  # (pairs, D)
            self.metric_gradient(difference, grad * difference)
            grad = self.apply(grad * difference).mul_(2)
            grad_x.index_add_(0, i, grad)
            grad_y.index_add_(0, k, grad, alpha=-1)

    def finish(self, grad_y):
        if self.parameter is None:
            grad_y.addcmul_(self.y, self.columns[:, None], value=2)
            return None
        for rows, columns, grad in zip(blocks(self.y), blocks(self.columns[:, None], self.y.shape[1]), blocks(grad_y)):
            self.metric_gradient(rows, rows * columns)
            grad.addcmul_(self.apply(rows), columns, value=2)
        return self.grad_metric


class CosinePairs(InnerProductPairs):
    def __init__(self, y, parameter, dtype):
        super().__init__(y, parameter, dtype)
        self.inverse = inverse_norm(self.y)[:, 0]  # (V,)
        self.one = self.y.new_ones(())
        self.widest = widest(self.y.device)

    def values(self, x):
        self.close = []
        # Rounded to bfloat16 after a division, rows that were exact in it would not be: `complete` divides those products.
        return self.products.forward(x if self.products.rounds_operands else x * inverse_norm(x))

    def complete(self, u, x, first):
        if self.products.rounds_operands:
            u.mul_(inverse_norm(x))
        torch.addcmul(self.one, u, self.inverse, value=-1, out=u)
        for i, k in cancelled(u, CANCELLED, lambda rows: CANCELLED):  # in float64: rounded unit vectors are themselves 1e-7 apart
            u[i, k] = (unit(x[i].to(self.widest)) - unit(self.y[k].to(self.widest))).square().sum(1).div(2).to(u.dtype)
            self.close.append((i + first, k))

    def backward(self, x, u, grad_u, weights, grads):
        grad_x, grad_y = grads
        inverse = inverse_norm(x)
        close = [(i, k, grad_u[i, k][:, None] * weights[i]) for i, k in self.close]
        for i, k, _ in close:
            grad_u[i, k] = 0
        towards = self.pull(grad_u.mul_(self.inverse), x * (-weights * inverse), grad_y).mul_(weights * inverse)
        grad_x += (towards * x).sum(1, keepdim=True) * inverse.square() * x - towards
        for i, k, grad in close:
            a, b = unit(x[i].to(self.widest)), unit(self.y[k].to(self.widest))  # (pairs, D)
            u_pairs = (a - b).square().sum(1, keepdim=True) / 2
            grad_x.index_add_(0, i, (a - b - a * u_pairs).to(x.dtype) * (grad * inverse[i]))
            grad_y.index_add_(0, k, (b - a - b * u_pairs).to(x.dtype) * (grad * self.inverse[k, None]))

    def finish(self, grad_y):
        for rows, inverse, grad in zip(blocks(self.y), blocks(self.inverse[:, None], self.y.shape[1]), blocks(grad_y)):
            radial = (rows * grad).sum(1, keepdim=True).mul_(inverse.square())
            grad.addcmul_(rows, radial, value=-1)
        return None


def cancelled(u: Tensor, bound, limit) -> list[tuple[Tensor, Tensor]]:
    """Index pairs (i, k), in blocks, of the u (n, V) that are not above their limit: limit(rows) -> (len(rows), V) or a number.

    bound: (n, 1) or a number, not below any limit of its row: rows whose smallest u is above it are passed over.
    """
    rows = (u.amin(1, keepdim=True) <= bound)[:, 0].nonzero()[:, 0]
    if len(rows) == 0:
        return []
    i, k = (u[rows] <= limit(rows)).nonzero(as_tuple=True)
    return list(zip(rows[i].split(4096), k.split(4096)))


def inverse_norm(rows: Tensor) -> Tensor:
    """1 / |x| of rows (n, D) -> (n, 1); 0 for a zero row."""
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return torch.where(norm == 0, 0.0, 1 / norm)


def unit(rows: Tensor) -> Tensor:
    return rows * inverse_norm(rows)


def blocks(rows: Tensor, width: int | None = None) -> tuple[Tensor, ...]:
    """Splits rows (n, D) into views of about BLOCK_ELEMENTS numbers each (counted as if rows were `width` wide)."""
    return rows.split(max(1, BLOCK_ELEMENTS // max(1, width or rows.shape[1])))
