import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from heads import fused_loss
from heads.kernels import inner_product
from tests.heads.harness import (
    BFloat16Units,
    assert_gradients_close,
    batch,
    head_gradients,
    make_head,
    reference_gradients,
    rounds_operands,
)

SOME = [
    ("linear", {}),
    ("euclidean", {"exponent": 9.0, "learn_exponent": True}),
    ("cosine", {"link": "gibbs"}),
    ("manhattan", {"exponent": 9.0}),
    ("bray_curtis", {"exponent": 9.0}),
    ("mahalanobis", {"exponent": 9.0, "covariance": "full"}),
    ("hamming", {"relaxation": "hard", "exponent": 9.0}),
]
some_heads = pytest.mark.parametrize("name, options", SOME, ids=[name for name, _ in SOME])


@some_heads
@pytest.mark.parametrize("rows", [1, 5, 32])
def test_results_do_not_depend_on_the_chunks(name, options, rows, monkeypatch):
    head = make_head(name, 33, 101, **options)
    hidden, targets = batch(127, 101, 33)
    loss, whole = head_gradients(head, hidden, targets)
    monkeypatch.setitem(fused_loss.CHUNK_ELEMENTS, "cpu", rows * 101)
    monkeypatch.setattr(fused_loss, "PROTOTYPES_PER_BUFFER", 10**9)
    monkeypatch.setitem(fused_loss.MINIMUM_ROWS, "cpu", 1)
    monkeypatch.setitem(fused_loss.PART_ELEMENTS, "cpu", 3 * 101)
    chunked_loss, chunked = head_gradients(head, hidden, targets)
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-5, atol=0)
    assert_gradients_close(chunked, {key: grad.double() for key, grad in whole.items()}, 1e-5)


@some_heads
def test_per_token_losses_pull_with_their_own_gradients(name, options):
    head = make_head(name, 33, 101, **options)
    hidden, targets = batch(7, 101, 33)
    weights = torch.linspace(-1, 2, 7)
    hidden.requires_grad_()
    (head(hidden, targets, reduction="none") * weights).sum().backward()
    grad = hidden.grad
    for row in range(7):
        _, grads = head_gradients(head, hidden[row : row + 1], targets[row : row + 1])
        torch.testing.assert_close(grad[row], weights[row] * grads["hidden"][0], rtol=1e-4, atol=1e-6)


@some_heads
def test_the_upstream_gradient_scales_everything(name, options):
    head = make_head(name, 33, 101, **options)
    hidden, targets = batch(7, 101, 33)
    _, grads = head_gradients(head, hidden, targets)
    head.zero_grad()
    hidden.requires_grad_()
    (-3 * head(hidden, targets)).backward()
    assert_gradients_close({"hidden": hidden.grad, **{key: p.grad for key, p in head.named_parameters()}},
                           {key: -3 * grad.double() for key, grad in grads.items()}, 1e-5)


@pytest.mark.parametrize("dtype, units", [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("name", ["linear", "euclidean", "cosine", "mahalanobis", "manhattan"])
def test_autocast_leaves_the_result_of_the_forward_product_in_float32(name, dtype, units, monkeypatch):
    """At cos = 0.95 and n = 28 a result rounded to bfloat16 is wrong by more than 1 nat; operands are rounded on some processors."""
    if units:
        monkeypatch.setattr(inner_product, "bfloat16_operands", BFloat16Units)
    options = {} if name == "linear" else {"exponent": 28.0}
    head = make_head(name, 64, 101, **options)
    _, targets = batch(7, 101, 64)
    noise, _ = batch(7, 101, 64, seed=8)
    hidden = head.weight.detach()[targets] + 0.32 * noise
    truth, expected = reference_gradients(head, hidden, targets, label_smoothing=0.1)
    with torch.autocast("cpu", dtype=dtype):
        loss, grads = head_gradients(head, hidden, targets, label_smoothing=0.1)
    assert abs(loss.item() - truth.item()) < (2e-2 if dtype == torch.bfloat16 and (units or rounds_operands()) else 1e-3)
    # A metric's gradient is a difference of products, each rounded to bfloat16.
    assert_gradients_close(grads, expected, 6e-2 if name == "mahalanobis" else 2e-2)


def test_gradient_sums_over_many_chunks_stay_exact_in_bfloat16(monkeypatch):
    head = make_head("cosine", 16, 101, exponent=9.0)
    hidden, targets = batch(256, 101, 16)
    _, expected = reference_gradients(head, hidden, targets)
    monkeypatch.setitem(fused_loss.MINIMUM_ROWS, "cpu", 1)
    errors = []
    for rows in (256, 1):
        monkeypatch.setitem(fused_loss.CHUNK_ELEMENTS, "cpu", rows * 101)
        monkeypatch.setattr(fused_loss, "PROTOTYPES_PER_BUFFER", 10**9)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, grads = head_gradients(head, hidden, targets)
        errors.append(((grads["weight"].double() - expected["weight"]).norm() / expected["weight"].norm()).item())
    assert errors[0] < (1e-2 if rounds_operands() else 5e-3) and errors[1] < 1.5 * errors[0]


def test_a_compiled_backbone():
    backbone = torch.nn.Linear(8, 33)
    compiled = torch.compile(backbone, backend="aot_eager")
    head = make_head("cosine", 33, 101, exponent=9.0)
    inputs, targets = batch(7, 101, 8)
    losses, grads = [], []
    for model in (backbone, compiled):
        backbone.zero_grad()
        loss = head(model(inputs), targets)
        loss.backward()
        losses.append(loss.detach())
        grads.append(backbone.weight.grad.clone())
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(grads[0], grads[1])


WORKER = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.heads.harness import batch, make_head
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = torch.nn.Linear(8, 33), make_head("euclidean", 33, 101, learn_exponent=True)
    def forward(self, inputs, targets):
        return self.head(self.backbone(inputs), targets, reduction="sum")

inputs, targets = batch(12, 101, 8)
model, alone = Model(), Model()
alone.head.calibrate(alone.backbone(inputs))
shares = (slice(0, 5), slice(5, 12))
model.head.calibrate(model.backbone(inputs[shares[rank]]), reduce=dist.all_reduce)
assert abs(model.head.exponent_value / alone.head.exponent_value - 1) < 1e-6
wrapped = DistributedDataParallel(model)
wrapped(inputs[shares[rank]], targets[shares[rank]]).backward()
alone(inputs, targets).backward()
for (name, p), q in zip(model.named_parameters(), alone.parameters()):
    torch.testing.assert_close(2 * p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)
dist.destroy_process_group()
os._exit(0)  # as commands.leave does, and why
"""


def test_two_processes_equal_one(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(WORKER)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    commands = [[*command, str(rank), str(tmp_path / "store")] for rank in (0, 1)]
    workers = [subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) for words in commands]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("spec, tokens, limit", [
    ("linear", 512, 64), ("euclidean", 512, 64), ("cosine", 512, 64), ("mahalanobis", 512, 64), ("mahalanobis:covariance=full", 512, 120),
    ("manhattan", 64, 120), ("chebyshev", 64, 120), ("bray_curtis", 128, 120), ("hamming", 128, 120),
])
def test_peak_memory_at_full_vocabulary(spec, tokens, limit):
    """Above inputs, parameters and gradients, in MB; tokens x V alone would be 103 MB for 512 tokens."""
    command = [sys.executable, "-m", "benchmarks.heads", "--tokens", str(tokens), "--threads", "1", "--memory-of", spec]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    peak = float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1])
    assert 0 < peak <= limit and not math.isnan(peak)


@some_heads
@pytest.mark.parametrize("options_of_loss", [{}, {"label_smoothing": 0.2}, {"reduction": "none"}], ids=str)
def test_products_over_padded_rows_change_nothing(name, options, options_of_loss, monkeypatch):
    """As on CUDA, where a vocabulary that is no multiple of 8 would be slow."""
    for extra in ({}, {"bias": True}) if name == "linear" else ({},):
        head = make_head(name, 33, 101, **options, **extra)
        hidden, targets = batch(7, 101, 33)
        with torch.no_grad():
            head.weight[101] = hidden[0]  # a padded row where u vanishes
        results = []
        for device in ("cuda", "cpu"):
            monkeypatch.setattr(fused_loss, "WHOLE_PRODUCTS", {device})
            head.zero_grad()
            rows = hidden.clone().requires_grad_()
            loss = head(rows, targets, **options_of_loss)
            loss.sum().backward()
            results.append((loss.detach(), {"hidden": rows.grad, **{key: p.grad.clone() for key, p in head.named_parameters()}}))
        (loss, grads), (padded_loss, padded_grads) = results
        torch.testing.assert_close(padded_loss, loss)
        assert_gradients_close(padded_grads, {key: grad.double() for key, grad in grads.items()}, 1e-5)
        assert (padded_grads["weight"][101:] == 0).all()
