"""Fuses the formula of one tile into a single kernel with torch.compile (C++ on a CPU, Triton on CUDA).

A tile formula broadcasts (n, 1, D) against (1, m, D) and reduces: run as it stands it holds n x m x D numbers, fused it holds none of them.
Compilation happens at the first use, once per formula and kernel, for all shapes. Where it fails (no C++ compiler, an old GPU, Windows),
one warning says so and the caller keeps to the formula itself, on small tiles.
"""

import types
import warnings

import torch

FUSED_DEVICES = ("cpu", "cuda")

_fused = {}  # (device type, dtype, D, threads, formula, kernel) -> compiled formula
_broken = set()  # device types on which torch.compile has failed


def fused(formula, kernel, x, pair_arguments):
    """`formula`, compiled for `kernel` and rows like x, or None where torch.compile does not work.

    formula: a plain function of (kernel, a (n, D), b (m, D), then `pair_arguments` tensors (n, m)); kernel: hashable; x (..., D) gives D,
    dtype (narrower ones are taken as float32) and device. The result is called like the formula, with contiguous tensors of that dtype.
    It serves all n and m; a size of 1, or tensors made in inference mode, compile once more.
    """
    device, dtype, width = x.device, torch.promote_types(x.dtype, torch.float32), x.shape[-1]
    if device.type not in FUSED_DEVICES or device.type in _broken:
        return None
    # The C++ loops are generated for a number of threads, and for D: they are a third faster than with a variable D.
    key = (device.type, dtype, width, torch.get_num_threads(), formula, kernel)
    if key not in _fused:
        n, m = 48, 520  # of the size of a real tile: the generated loops are divided among threads accordingly
        shapes = [(n, width), (m, width)] + [(n, m)] * pair_arguments
        a, b, *pairs = example = [torch.full(shape, 0.5, dtype=dtype, device=device) for shape in shapes]
        formula(kernel, a[:2], b, *(pair[:2] for pair in pairs))  # an error here is the formula's own: it must not pass for the compiler's
        try:
            _fused[key] = _compile(formula, kernel, example)
        except Exception as error:  # from any stage of torch.compile: they share no base class
            _broken.add(device.type)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"torch.compile does not work here ({reason[:200]}): distances on {device.type} run unfused, which is slow",
                          RuntimeWarning, stacklevel=2)
            return None
    return _fused[key]


def _compile(formula, kernel, example):
    # A code object of its own: torch.compile counts recompilations per code object, and gives up after a few.
    code = formula.__code__.replace(co_name=f"{formula.__name__.strip('_')}_{type(kernel).__name__}")
    compiled = torch.compile(types.FunctionType(code, formula.__globals__))
    if torch._dynamo.config.disable:
        raise RuntimeError("torch.compile is switched off")
    a, b, *pairs = example
    for tensor, dimensions in ((a, 0), (b, 0), *((pair, (0, 1)) for pair in pairs)):
        torch._dynamo.mark_dynamic(tensor, dimensions)
    compiled(kernel, *example)
    return compiled
