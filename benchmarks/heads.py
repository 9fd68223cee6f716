"""Side-by-side measurements of the vocabulary heads: time of forward + backward, and memory.

    python -m benchmarks.heads --tokens 512 --vocab-size 50304 --n-embd 256
    python -m benchmarks.heads --heads cosine,minkowski:p=1.5 --dtype bfloat16 --json heads.json

Every head takes turns with what it is compared to, round by round in one process, so that a busy machine slows both alike:
nn.Linear + F.cross_entropy; F.linear_cross_entropy, where torch has it; the three bare matrix products of any exact method; for distances
that torch.cdist knows, torch.cdist with autograd; and under autocast, itself in float32. Peak memory is measured in a process of its own
for each head, beyond the inputs, the parameters and their gradients.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from commands import InputError, Parser, RunFailed, command
from heads import build_head

DEFAULT_HEADS = (
    "linear,euclidean,cosine,minkowski:p=2,mahalanobis:covariance=diagonal,mahalanobis:covariance=cholesky,mahalanobis:covariance=full,"
    "manhattan,bray_curtis,hamming,canberra,chebyshev,minkowski:p=1.5,minkowski:p=3"
)
CDIST_P = {"euclidean": 2.0, "manhattan": 1.0, "bray_curtis": 1.0, "hamming": 1.0, "canberra": 1.0, "chebyshev": float("inf")}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXPONENT = 28.0  # any: it changes no cost


def main(argv: list[str]) -> None:
    settings = parser().parse_args(argv)
    if settings.memory_of:
        print(peak_memory(settings.memory_of, settings))
        return
    try:
        rows = [measure(spec, settings) for spec in settings.heads.split(",")]
    except ValueError as error:
        raise InputError(f"--heads: {error}") from None
    print_table(rows, settings)
    if settings.json:
        report = {"settings": vars(settings), "machine": machine(settings), "rows": rows}
        Path(settings.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parser() -> Parser:
    it = Parser(prog="python -m benchmarks.heads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    it.add_argument("--heads", default=DEFAULT_HEADS, help="names, with options as name:key=value:key=value (default: all)")
    it.add_argument("--tokens", type=int, default=512, help="hidden states per loss (default 512)")
    it.add_argument("--vocab-size", type=int, default=50304, help="words (default 50304)")
    it.add_argument("--n-embd", type=int, default=256, help="width (default 256)")
    it.add_argument("--dtype", choices=DTYPES, default="float32", help="float32, or the autocast dtype (default float32)")
    it.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    it.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: torch's)")
    it.add_argument("--rounds", type=int, default=7, help="measurements of each, after one to warm up (default 7)")
    it.add_argument("--cdist-tokens", type=int, default=32, help="tokens given to torch.cdist, which is slow; its time is scaled (default 32)")
    it.add_argument("--no-memory", action="store_true", help="leave out the memory measurements")
    it.add_argument("--json", help="also write everything to this file")
    it.add_argument("--memory-of", help=argparse.SUPPRESS)
    return it


def parse_head(spec: str, settings):
    """name:key=value -> the head, on its device."""
    name, *pairs = spec.split(":")
    options = dict(pair.split("=", 1) for pair in pairs)
    options = {key: number(value) for key, value in options.items()}
    if name != "linear" and options.get("link") != "gibbs":
        options.setdefault("exponent", EXPONENT)
    head = build_head(name, settings.n_embd, settings.vocab_size, **options)
    torch.nn.init.normal_(head.weight, std=1.0 if name in CDIST_P and name != "euclidean" else 0.02)
    return head.to(settings.device)


def number(text: str):
    try:
        return float(text)
    except ValueError:
        return {"true": True, "false": False}.get(text, text)


def inputs(settings, tokens=None):
    tokens = tokens or settings.tokens
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, settings.n_embd, generator=generator).to(settings.device).requires_grad_()
    return hidden, torch.randint(settings.vocab_size, (tokens,), generator=generator).to(settings.device)


def contestants(spec: str, settings) -> dict:
    """name -> (a function that does forward + backward once, factor on its time)."""
    head, (hidden, targets) = parse_head(spec, settings), inputs(settings)
    linear = torch.nn.Linear(settings.n_embd, settings.vocab_size, bias=False, device=settings.device)
    torch.nn.init.normal_(linear.weight, std=0.02)
    low = settings.dtype != "float32"

    def step(loss, *modules, low=low):
        def run():
            for tensor in (hidden, *(p for module in modules for p in module.parameters())):
                tensor.grad = None
            with torch.autocast(settings.device, dtype=DTYPES[settings.dtype] if low else torch.bfloat16, enabled=low):
                value = loss()
            value.backward()
        return run

    runs = {
        "head": (step(lambda: head(hidden, targets), head), 1.0),
        "linear_cross_entropy_eager": (step(lambda: F.cross_entropy(linear(hidden).float(), targets), linear), 1.0),
        "bare_products": (bare_products(hidden.detach(), linear.weight.detach(), DTYPES[settings.dtype]), 1.0),
    }
    if low:
        runs["own_float32"] = (step(lambda: head(hidden, targets), head, low=False), 1.0)
    if hasattr(F, "linear_cross_entropy"):
        runs["torch_linear_cross_entropy"] = (step(lambda: F.linear_cross_entropy(hidden, linear.weight, targets), linear), 1.0)
    name, p = spec.split(":")[0], next((float(part[2:]) for part in spec.split(":") if part.startswith("p=")), None)
    p = p if name == "minkowski" else CDIST_P.get(name)
    if p is not None:
        part, part_targets = inputs(settings, min(settings.cdist_tokens, settings.tokens))

        def cdist():
            part.grad = head.weight.grad = None
            d = torch.cdist(part, head.weight, p=p)
            F.cross_entropy(-EXPONENT * d.log(), part_targets).backward()
        runs["torch_cdist"] = (cdist, settings.tokens / len(part))
    return runs


def bare_products(x, w, dtype):
    x, w = x.to(dtype), w.to(dtype)
    u, grad_x, grad_w = x.new_empty(len(x), len(w)), torch.empty_like(x), torch.empty_like(w)

    def run():
        torch.mm(x, w.t(), out=u)
        torch.mm(u, w, out=grad_x)
        torch.mm(u.t(), x, out=grad_w)
    return run


def measure(spec: str, settings) -> dict:
    """One row: milliseconds (median, quartiles), ratios to the others of the same round, rate, peak memory."""
    torch.set_num_threads(settings.threads)
    runs = contestants(spec, settings)
    times = {name: [] for name in runs}
    for round_ in range(settings.rounds + 1):
        for name, (run, factor) in runs.items():
            gc.collect()
            synchronize(settings)
            start = time.perf_counter()
            run()
            synchronize(settings)
            if round_:  # the first round warms up, and compiles
                times[name].append((time.perf_counter() - start) * 1e3 * factor)
    work = settings.tokens * settings.vocab_size * settings.n_embd
    row = {"head": spec, **{f"{name}_ms": summary(values) for name, values in times.items()}}
    row["ratio"] = {name: statistics.median(a / b for a, b in zip(times["head"], values)) for name, values in times.items() if name != "head"}
    row["g_elements_per_s"] = work / row["head_ms"]["median"] / 1e6  # pairs of coordinates; a matrix product head multiplies 3 times for each
    if not settings.no_memory:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in vars(settings).items() if key in
                 ("tokens", "vocab_size", "n_embd", "dtype", "device", "threads")]
        words = [sys.executable, "-m", "benchmarks.heads", *flags, "--memory-of", spec]
        # Freed memory goes back to the system at once, so that what the process holds is what is in use.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
        child = subprocess.run(words, env=environment, capture_output=True, text=True)
        if child.returncode:
            raise RunFailed(f"measuring the memory of {spec}: {child.stderr.strip()[-300:]}")
        row["peak_memory_mb"] = float(child.stdout.split()[-1])
    return row


def summary(values):
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": middle, "quartiles": [low, high], "n": len(values)}


def synchronize(settings):
    if settings.device != "cpu":
        torch.cuda.synchronize()


def peak_memory(spec: str, settings) -> float:
    """MB (1e6 bytes) that one forward + backward holds at most beyond inputs, parameters and gradients; for a process of its own."""
    torch.set_num_threads(settings.threads)
    head, (hidden, targets) = parse_head(spec, settings), inputs(settings)
    low = settings.dtype != "float32"

    def run(tokens):
        with torch.autocast(settings.device, dtype=DTYPES[settings.dtype] if low else torch.bfloat16, enabled=low):
            loss = head(hidden[:tokens], targets[:tokens])
        loss.backward()

    run(min(settings.tokens, 4))  # loads libraries
    if settings.vocab_size * settings.n_embd * settings.tokens >= 2**24:
        run(settings.tokens)  # compiles
    hidden.grad = None
    head.zero_grad()
    gc.collect()
    before = memory_now(settings)
    run(settings.tokens)
    peak = memory_peak(settings)
    gradients = [hidden.grad, *(parameter.grad for parameter in head.parameters())]
    return max(0.0, (peak - before) / 1e6 - sum(grad.numel() * grad.element_size() for grad in gradients) / 1e6)


def memory_now(settings) -> int:
    """Bytes in use; the peak is counted from here."""
    if settings.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the process's peak
    except OSError as error:
        raise InputError(f"peak memory on a CPU is read from Linux's /proc ({error}): use --no-memory") from None
    return proc_status("VmRSS")


def memory_peak(settings) -> int:
    return torch.cuda.max_memory_allocated() if settings.device != "cpu" else proc_status("VmHWM")


def proc_status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def machine(settings) -> dict:
    device = torch.cuda.get_device_name() if settings.device != "cpu" else torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "threads": settings.threads, "device": device}


def cell(value, form=".2f"):
    return "-" if value is None else format(value, form)


def print_table(rows, settings):
    print(f"{settings.tokens} tokens, V {settings.vocab_size}, D {settings.n_embd}, {settings.dtype}, {settings.device}, {settings.threads} threads, "
          f"median of {settings.rounds} [quartiles]; x: time relative to, in the same rounds")
    print(f"{'head':34s}{'ms':>9s}{'quartiles':>20s}{'G elem/s':>10s}{'peak MB':>9s}"
          f"{'x linear+CE':>13s}{'x torch LCE':>13s}{'x products':>12s}{'x own fp32':>12s}{'cdist x':>9s}")
    for row in rows:
        ratio, (low, high) = row["ratio"], row["head_ms"]["quartiles"]
        cdist = ratio.get("torch_cdist")
        print(f"{row['head']:34s}{row['head_ms']['median']:9.1f}{f'[{low:.1f}, {high:.1f}]':>20s}{row['g_elements_per_s']:10.2f}"
              f"{cell(row.get('peak_memory_mb'), '.1f'):>9s}{cell(ratio['linear_cross_entropy_eager']):>13s}"
              f"{cell(ratio.get('torch_linear_cross_entropy')):>13s}{cell(ratio['bare_products']):>12s}"
              f"{cell(ratio.get('own_float32')):>12s}{cell(cdist and 1 / cdist, '.1f'):>9s}")
    print("G elem/s: tokens x V x D per second of forward + backward; cdist x: how many times the throughput of torch.cdist with autograd")


if __name__ == "__main__":
    command(main)
