import pytest
import torch
from scipy.spatial.distance import cdist

from heads.kernels.inner_product import CosineDistance, Dot, SquaredDistance, bfloat16_operands
from tests.heads.harness import batch

KERNELS = [Dot(), SquaredDistance(), CosineDistance()]
ORACLES = {
    "Dot": lambda x, y: x @ y.T,
    "SquaredDistance": lambda x, y: cdist(x, y, "sqeuclidean"),
    "CosineDistance": lambda x, y: cdist(x, y, "cosine"),
}
by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)


def rows(n, m, width, dtype=torch.float32):
    x, _ = batch(n, 2, width, seed=2)
    y, _ = batch(m, 2, width, seed=3)
    return x.to(dtype), y.to(dtype)


@by_name
@pytest.mark.parametrize("n, m, width", [(1, 1, 1), (3, 7, 2), (17, 301, 33)])
def test_values_match_scipy(kernel, n, m, width):
    x, y = rows(n, m, width)
    expected = torch.from_numpy(ORACLES[type(kernel).__name__](x.double().numpy(), y.double().numpy()))
    torch.testing.assert_close(kernel.pairwise(x, y).double(), expected, rtol=1e-5, atol=1e-6 if isinstance(kernel, Dot) else 1e-7)
    torch.testing.assert_close(kernel.pairwise(x.double(), y.double()), expected, rtol=1e-10, atol=1e-12)


@by_name
def test_gradients_match_autograd(kernel):
    x, y = (part.requires_grad_() for part in rows(5, 9, 7, torch.float64))
    grad_u = torch.randn(5, 9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    unit = torch.nn.functional.normalize
    u = {"Dot": lambda: x @ y.t(), "SquaredDistance": lambda: (x[:, None] - y).square().sum(-1),
         "CosineDistance": lambda: 1 - unit(x, dim=1) @ unit(y, dim=1).t()}[type(kernel).__name__]()
    expected = torch.autograd.grad((grad_u * u).sum(), (x, y))
    buffers = torch.ones_like(x), torch.ones_like(y)  # it adds
    kernel.backward(x.detach(), y.detach(), u.detach(), grad_u, *buffers)
    for actual, wanted in zip(buffers, expected):
        torch.testing.assert_close(actual - 1, wanted)


@pytest.mark.parametrize("apart", [1e-2, 1e-3, 1e-5])
def test_near_rows_keep_their_digits(apart):
    """|x|^2 + |y|^2 - 2 x . y in float32 would be noise: 2 eps |x|^2 = 2e-4 at |x|^2 = 768 against a distance of 1e-7 to 1e-1."""
    y, _ = batch(40, 2, 768)
    direction, _ = batch(40, 2, 768, seed=9)
    x = (y + apart * direction).requires_grad_()
    exact = (x.detach().double()[:, None] - y.double()).square().sum(-1)
    u = SquaredDistance().pairwise(x.detach(), y)
    torch.testing.assert_close(u.double(), exact, rtol=1e-5, atol=0)
    grads = torch.zeros_like(y), torch.zeros_like(y)
    SquaredDistance().backward(x.detach(), y, u, torch.eye(40), *grads)
    expected = 2 * (x.detach().double() - y.double())
    torch.testing.assert_close(grads[0].double(), expected, rtol=1e-5, atol=1e-6 * apart)
    torch.testing.assert_close(grads[1].double(), -expected, rtol=1e-5, atol=1e-6 * apart)
    cosines = CosineDistance().pairwise(x.detach(), y).diagonal().double()
    unit = torch.nn.functional.normalize
    torch.testing.assert_close(cosines, (unit(x.detach().double(), dim=1) - unit(y.double(), dim=1)).square().sum(1) / 2, rtol=1e-5, atol=0)


def test_rows_far_from_the_origin():
    """An offset common to all rows leaves no pair that is not recomputed."""
    x, y = rows(9, 31, 16)
    x, y = x + 1000, y + 1000
    exact = (x.double()[:, None] - y.double()).square().sum(-1)
    torch.testing.assert_close(SquaredDistance().pairwise(x, y).double(), exact, rtol=1e-5, atol=0)


def test_a_zero_row_has_cosine_distance_one_and_no_gradient():
    x, y = rows(3, 5, 4)
    x[1] = 0
    y[2] = 0
    u = CosineDistance().pairwise(x, y)
    assert (u[1] == 1).all() and (u[:, 2] == 1).all()
    grads = torch.zeros_like(x), torch.zeros_like(y)
    CosineDistance().backward(x, y, u, torch.ones_like(u), *grads)
    assert (grads[0][1] == 0).all() and (grads[1][2] == 0).all() and torch.isfinite(grads[0]).all() and torch.isfinite(grads[1]).all()


@pytest.mark.parametrize("metric", ["diagonal", "full"])
def test_a_metric_and_its_gradient(metric):
    x, y = (part.requires_grad_() for part in rows(5, 9, 6, torch.float64))
    factor = torch.randn(6, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    M = (factor.diagonal().exp() if metric == "diagonal" else factor @ factor.t()).requires_grad_()
    with torch.no_grad():
        x[0] = y[0] + 1e-3  # a pair that is recomputed
    difference = x[:, None] - y
    u = (difference * (difference * M if metric == "diagonal" else difference @ M)).sum(-1)
    grad_u = torch.randn(5, 9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    expected = torch.autograd.grad((grad_u * u).sum(), (x, y, M))
    pairs = SquaredDistance().bind(y.detach(), M.detach(), torch.float64)
    grads = [torch.zeros_like(x), torch.zeros_like(y)]
    for rows_ in (slice(0, 2), slice(2, 5)):  # in two chunks
        values = pairs.values(x.detach()[rows_])
        pairs.complete(values, x.detach()[rows_], 0)
        torch.testing.assert_close(values, u.detach()[rows_])
        ones = torch.ones(len(values), 1, dtype=torch.float64)
        pairs.backward(x.detach()[rows_], values, grad_u[rows_].clone(), ones, (grads[0][rows_], grads[1]))
    grad_M = pairs.finish(grads[1])
    if metric == "full":
        grad_M, wanted = (grad_M + grad_M.t()) / 2, (expected[2] + expected[2].t()) / 2
    else:
        wanted = expected[2]
    for actual, want in zip((*grads, grad_M), (*expected[:2], wanted)):
        torch.testing.assert_close(actual, want)


def test_the_precision_asked_of_onednn_is_given_back():
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("none", "ieee"):
            matmul.fp32_precision = precision
            with pytest.raises(ZeroDivisionError), bfloat16_operands():
                assert matmul.fp32_precision == "bf16"
                raise ZeroDivisionError
            assert matmul.fp32_precision == precision
    finally:
        matmul.fp32_precision = before
