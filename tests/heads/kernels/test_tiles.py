"""Values against SciPy and NumPy, gradients against autograd of the definition, all in float64; then the hard inputs."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from heads.kernels import tiles
from heads.kernels.tiles import Canberra, Maximum, PowerNorm, PowerSum, SmoothMaximum

KERNELS = [PowerSum(1), PowerSum(1.5), PowerSum(2.0), PowerSum(2.7), PowerSum(3), PowerSum(6.5), PowerNorm(7.5), PowerNorm(200), Canberra(),
           Canberra(min_denominator=0.8), Maximum(), SmoothMaximum(4.0)]
SHAPES = [(1, 3, 2), (7, 509, 33), (127, 3, 33), (127, 509, 2), (1, 509, 33)]


def rows(n, width, seed, dtype=torch.float32):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def definition(kernel, x, y):
    """The kernel as its docstring says it, on whole tensors, differentiable."""
    t = (x[:, None] - y[None]).abs()
    match kernel:
        case PowerSum(p=p):
            return (t**p).sum(-1)
        case PowerNorm(p=p):
            unit = t.detach().amax(-1, keepdim=True).clamp(min=1e-300)  # any constant: the norm is homogeneous
            return torch.linalg.vector_norm(t / unit, ord=p, dim=-1) * unit[..., 0]
        case Canberra(eps=eps, min_denominator=floor):
            s = x.abs()[:, None] + y.abs()[None] + eps
            return (t / torch.where(s > floor, s, floor)).sum(-1)
        case Maximum():
            return t.max(-1).values
        case SmoothMaximum(alpha=alpha):
            return (torch.logsumexp(alpha * t, -1) - math.log(t.shape[-1])) / alpha


def oracle(kernel, x, y):
    """Values by SciPy or NumPy."""
    x, y = x.double().numpy(), y.double().numpy()
    t = np.abs(x[:, None] - y[None])
    match kernel:
        case PowerSum(p=p):
            return cdist(x, y, "minkowski", p=p) ** p
        case PowerNorm(p=p):
            largest = t.max(-1)  # SciPy's own powers underflow
            return largest * ((t / largest[..., None]) ** p).sum(-1) ** (1 / p)
        case Canberra(eps=eps, min_denominator=floor):
            return np.sum(t / np.maximum(np.abs(x)[:, None] + np.abs(y)[None] + eps, floor), -1)
        case Maximum():
            return cdist(x, y, "chebyshev")
        case SmoothMaximum(alpha=alpha):
            return np.log(np.mean(np.exp(alpha * t), -1)) / alpha


def gradients(kernel, x, y, grad_u):
    u = kernel.pairwise(x, y)
    grad_x, grad_y = torch.zeros(x.shape, dtype=u.dtype), torch.zeros(y.shape, dtype=u.dtype)
    kernel.backward(x, y, u, grad_u, grad_x, grad_y)
    return grad_x, grad_y


def check_gradients(kernel, n, m, width, tolerance=2e-5):
    """float32 gradients against autograd of the definition in float64: error relative to the gradient's norm."""
    x, y, grad_u = rows(n, width, 1), rows(m, width, 2), rows(n, m, 3)
    wide = [part.double().requires_grad_() for part in (x, y)]
    expected = torch.autograd.grad(definition(kernel, *wide), wide, grad_u.double())
    for ours, truth in zip(gradients(kernel, x, y, grad_u), expected):
        assert (ours - truth).norm() <= tolerance * truth.norm(), kernel


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("n, m, width", SHAPES)
def test_values_and_gradients(kernel, n, m, width):
    x, y = rows(n, width, 1), rows(m, width, 2)
    u = kernel.pairwise(x, y)
    assert u.shape == (n, m) and u.dtype == torch.float32
    np.testing.assert_allclose(u.numpy(), oracle(kernel, x, y), rtol=2e-5, atol=1e-6)
    check_gradients(kernel, n, m, width)


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, x, y):
        ctx.kernel = kernel
        ctx.save_for_backward(x, y, u := kernel.pairwise(x, y))
        return u

    @staticmethod
    def backward(ctx, grad_u):
        x, y, u = ctx.saved_tensors
        grad_x, grad_y = torch.zeros_like(x), torch.zeros_like(y)
        ctx.kernel.backward(x, y, u, grad_u, grad_x, grad_y)
        return None, grad_x, grad_y


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_gradcheck(kernel):
    x, y = (rows(n, 5, n, torch.float64).requires_grad_() for n in (3, 4))
    assert torch.autograd.gradcheck(lambda x, y: Pair.apply(kernel, x, y), (x, y))


@pytest.mark.parametrize("factor", [-1, 2, 0])
@pytest.mark.parametrize("base", [PowerSum, Maximum], ids=lambda base: base.__name__)
def test_a_wrong_slope_is_caught(base, factor):
    class Wrong(base):
        def slope(self, a, b, u):
            return factor * super().slope(a, b, u)

    with pytest.raises(AssertionError):
        check_gradients(Wrong(*[1][:len(base.__dataclass_fields__)]), 7, 11, 5)


def test_gradients_are_added():
    x, y, grad_u = rows(3, 4, 1), rows(5, 4, 2), rows(3, 5, 3)
    kernel = Canberra()
    grad_x, grad_y = torch.ones(3, 4, dtype=torch.float64), torch.ones(5, 4, dtype=torch.float64)
    kernel.backward(x, y, kernel.pairwise(x, y), grad_u, grad_x, grad_y)
    for total, added in zip((grad_x, grad_y), gradients(kernel, x, y, grad_u)):
        torch.testing.assert_close(total, 1 + added.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_tiles_do_not_show(kernel, monkeypatch):
    x, y, grad_u = rows(23, 6, 1), rows(31, 6, 2), rows(23, 31, 3)
    whole = kernel.pairwise(x, y), *gradients(kernel, x, y, grad_u)
    monkeypatch.setitem(tiles.PLAIN_TILE, "cpu", tiles.Tile(rows=5, elements=5 * 6 * 7))
    tiled = kernel.pairwise(x, y), *gradients(kernel, x, y, grad_u)
    for one, many in zip(whole, tiled):
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_equal_rows_have_value_and_gradient_zero(kernel):
    x = rows(6, 33, 1)
    x[2] = 0
    y = torch.where(x == 0, -0.0, x)
    assert torch.equal(kernel.pairwise(x, y).diagonal(), torch.zeros(6))
    grad_x, grad_y = gradients(kernel, y, x, torch.eye(6))
    assert torch.equal(grad_x, torch.zeros(6, 33)) and torch.equal(grad_y, torch.zeros(6, 33))


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("scale", [1e-4, 1e4, 1e18])
def test_scales(kernel, scale):
    if isinstance(kernel, PowerSum) and scale**kernel.p > 1e36:
        pytest.skip("the sum of powers itself is above float32's largest number")
    x, y, grad_u = rows(7, 33, 1) * scale, rows(11, 33, 2) * scale, rows(7, 11, 3)
    y[0] = x[0]
    u, grads = kernel.pairwise(x, y), gradients(kernel, x, y, grad_u)
    assert all(part.isfinite().all() for part in (u, *grads))
    truth = definition(kernel, x.double(), y.double())
    assert (u - truth).norm() <= 1e-5 * truth.norm()
    wide = [part.double().requires_grad_() for part in (x, y)]
    expected = torch.autograd.grad(definition(kernel, *wide), wide, grad_u.double())
    for ours, truth in zip(grads, expected):
        assert (ours - truth).norm() <= 1e-4 * truth.norm()


def test_tied_maxima_share_the_gradient():
    x, y = torch.tensor([[3.0, -3.0, 1.0, 3.0]]), torch.zeros(1, 4)
    grad_x, grad_y = gradients(Maximum(), x, y, torch.tensor([[6.0]]))
    assert grad_x.tolist() == [[2, -2, 0, 2]] and grad_y.tolist() == [[-2, 2, 0, -2]]


@pytest.mark.parametrize("kernel", [Maximum(), SmoothMaximum(4.0)], ids=repr)
def test_a_floored_value_passes_no_gradient(kernel):
    x, y, grad_u = rows(5, 33, 1), rows(9, 33, 2), rows(5, 9, 3)
    u, grad_x, grad_y = kernel.pairwise(x, y), torch.zeros(5, 33), torch.zeros(9, 33)
    u[2], u[4] = 1e3, 1e30
    kernel.backward(x, y, u, grad_u, grad_x, grad_y)
    assert torch.equal(grad_x[[2, 4]], torch.zeros(2, 33)) and (grad_x[[0, 1, 3]] != 0).any(1).all()
    without = gradients(kernel, x[[0, 1, 3]], y, grad_u[[0, 1, 3]])[1]
    torch.testing.assert_close(grad_y, without, rtol=1e-5, atol=1e-5)


def test_smooth_maximum_lies_between_mean_and_maximum():
    x, y = rows(5, 33, 1), rows(9, 33, 2)
    largest, mean = Maximum().pairwise(x, y), PowerSum(1).pairwise(x, y) / 33
    torch.testing.assert_close(SmoothMaximum(1e5).pairwise(x, y), largest, rtol=1e-4, atol=0)
    torch.testing.assert_close(SmoothMaximum(1e-3).pairwise(x, y), mean, rtol=2e-3, atol=0)


def test_narrow_rows_are_widened_also_under_autocast():
    x, y, grad_u = rows(4, 33, 1, torch.bfloat16), rows(6, 33, 2, torch.bfloat16), rows(4, 6, 3)
    kernel = SmoothMaximum(4.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u, grads = kernel.pairwise(x, y), gradients(kernel, x, y, grad_u)
    assert u.dtype == torch.float32 and torch.equal(u, kernel.pairwise(x.float(), y.float()))
    for narrow, wide in zip(grads, gradients(kernel, x.float(), y.float(), grad_u)):
        assert torch.equal(narrow, wide)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_row_shows(kernel, bad):
    x, y = rows(3, 5, 1), rows(4, 5, 2)
    x[1, 2] = bad
    u = kernel.pairwise(x, y)
    assert not u[1].isfinite().any() and u[[0, 2]].isfinite().all()


def test_nothing_to_do():
    kernel, x, y = PowerSum(1), torch.empty(0, 5), rows(4, 5, 1)
    assert kernel.pairwise(x, y).shape == (0, 4)
    assert torch.equal(gradients(kernel, x, y, torch.empty(0, 4))[1], torch.zeros(4, 5))
