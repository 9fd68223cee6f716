"""The compiled tiles against the plain ones, the machine without a compiler, and what both take in memory. Real compilations."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heads.kernels import fusing, tiles
from heads.kernels.tiles import Canberra, Maximum, PowerNorm, PowerSum, SmoothMaximum

ROOT = Path(__file__).parents[3]
N, M, WIDTH = 70, 2050, 130  # above tiles.FUSE_FROM, and no multiple of a vector or a tile


def run(kernel, n, m, width=WIDTH):
    generator = torch.Generator().manual_seed(0)
    x, y, grad_u = (torch.randn(*shape, generator=generator) for shape in ((n, width), (m, width), (n, m)))
    grad_x, grad_y = torch.zeros_like(x), torch.zeros_like(y)
    u = kernel.pairwise(x, y)
    kernel.backward(x, y, u, grad_u, grad_x, grad_y)
    return u, grad_x, grad_y


def check_fused_equals_plain(kernel, monkeypatch, n=N, m=M):
    fused = run(kernel, n, m)
    assert (tiles._gradients, kernel) in {key[-2:] for key in fusing._fused} and not fusing._broken, "not compiled"
    monkeypatch.setattr(fusing, "FUSED_DEVICES", ())
    for ours, plain in zip(fused, run(kernel, n, m)):
        assert (ours - plain).norm() <= 1e-5 * plain.norm()


def test_fused_equals_plain(monkeypatch):
    check_fused_equals_plain(PowerSum(1), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [PowerSum(1.5), PowerSum(2.7), PowerSum(3), PowerNorm(7.5), Canberra(),
                                    Canberra(min_denominator=0.8), Maximum(), SmoothMaximum(4.0)], ids=repr)
def test_every_kernel_fused_equals_plain(kernel, monkeypatch):
    check_fused_equals_plain(kernel, monkeypatch)


@pytest.mark.slow
def test_one_compilation_serves_all_shapes_and_threads(monkeypatch):
    kernel, threads = Canberra(eps=1e-9), torch.get_num_threads()
    run(kernel, N, M)
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            for n, m in ((17, 9001), (300, 601), (WIDTH, 1500), (400, 400)):
                run(kernel, n, m)
            torch.set_num_threads(threads + 1)
            kernel.pairwise(torch.ones(1, 1), torch.ones(1, 1))
        run(kernel, N, M)
        with torch._dynamo.config.patch(error_on_recompile=True):
            check_fused_equals_plain(kernel, monkeypatch, 40, 5000)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_float64_and_inference_mode(monkeypatch):
    kernel, x, y = PowerSum(6.5), torch.randn(N, WIDTH, dtype=torch.float64), torch.randn(M, WIDTH, dtype=torch.float64)
    expected = torch.cdist(x, y, p=6.5) ** 6.5
    torch.testing.assert_close(kernel.pairwise(x, y), expected, rtol=1e-10, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(kernel.pairwise(x.clone(), y.clone()), expected, rtol=1e-10, atol=0)
    assert fusing._fused and not fusing._broken


@pytest.mark.slow
def test_single_row(monkeypatch):
    check_fused_equals_plain(PowerSum(1), monkeypatch, n=1, m=140_000)


def test_small_work_stays_plain():
    kernel = PowerSum(1.25)
    run(kernel, 5, 7)
    assert not [key for key in fusing._fused if key[-1] == kernel]


PROCESS = """
import resource, sys, warnings
import torch
from heads.kernels.tiles import Canberra, Maximum, PowerSum
n, m, width = {n}, {m}, {width}
torch.manual_seed(0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    small = torch.randn(64, width), torch.randn(2**18 // width, width)
    for kernel in PowerSum(1), Canberra(), Maximum():  # the compiler's own memory comes before the measurement
        u = kernel.pairwise(*small)
        kernel.backward(*small, u, u, *map(torch.zeros_like, small))
    x, y, u, grad_u = torch.randn(n, width), torch.randn(m, width), torch.ones(n, m), torch.ones(n, m)
    grad_x, grad_y = torch.ones_like(x), torch.ones_like(y)
    some, seen = list(range(0, m, m // 50)), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kernel in PowerSum(1), Canberra(), Maximum():
        del u
        u = kernel.pairwise(x, y)
        kernel.backward(x, y, u, grad_u, grad_x.zero_(), grad_y.zero_())
        seen.append((u[:, some], *(grad.sum(0).sum().item() for grad in (grad_x, grad_y)), grad_x.abs().sum().item()))
    print("MIB", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    for index, (values, sum_x, sum_y, size) in enumerate(seen):
        t = (x[:, None] - y[some]).double().abs()
        truth = (t.sum(-1), (t / (x[:, None].abs() + y[some].abs())).sum(-1), t.amax(-1))[index]
        assert (values - truth).norm() < 1e-5 * truth.norm(), index
        assert index == 1 or abs(sum_x + sum_y) < 1e-3 * size  # a function of x - y: opposite gradients
loud = [str(w.message) for w in caught if not issubclass(w.category, DeprecationWarning)]  # torch's imports emit some
print("WARNINGS", sum("torch.compile does not work here" in text for text in loud), len(loud))
"""


def in_process(environment, **sizes):
    """Runs PROCESS: MiB above inputs, gradients and values; our warnings; all warnings but torch's deprecations."""
    result = subprocess.run([sys.executable, "-c", PROCESS.format(**sizes)], cwd=ROOT, env=os.environ | environment,
                            capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    mib = float(re.search(r"MIB (\S+)", result.stdout)[1])
    ours, every = map(int, re.search(r"WARNINGS (\d+) (\d+)", result.stdout).groups())
    return mib, ours, every


def test_without_a_compiler(tmp_path):
    """n x m x D would be 800 MiB here."""
    mib, ours, every = in_process({"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, n=64, m=50257, width=64)
    assert (ours, every) == (1, 1)
    assert mib < 40


@pytest.mark.slow
def test_memory_at_full_vocabulary():
    mib, ours, _ = in_process({}, n=128, m=50304, width=256)
    assert ours == 0
    assert mib < 40
