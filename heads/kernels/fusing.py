"""Fuses the formula of one tile into a single kernel with torch.compile (C++ on a CPU, Triton on CUDA).

A tile formula broadcasts (n, 1, D) against (1, m, D) and reduces: run as it stands it holds n x m x D numbers, fused it holds none of them.
Compilation happens at the first use, once per formula and kernel, for all shapes. Where it fails (no C++ compiler, an old GPU, Windows),
one warning says so and the caller keeps to the formula itself, on small tiles.
"""

import types
import warnings

import torch

FUSED_DEVICES = ("cpu", "cuda")

_fused = {}  # (device type, formula, kernel) -> compiled formula
_broken = set()  # device types on which torch.compile has failed


def fused(formula, kernel, device, pair_arguments):
    """`formula`, compiled for `kernel`, or None where torch.compile does not work.

    formula: a plain function of (kernel, a (n, D), b (m, D), then `pair_arguments` tensors (n, m)); kernel: hashable; device: a torch.device.
    The result is called like the formula, with contiguous float32 tensors and n, m, D >= 2.
    """
    if device.type not in FUSED_DEVICES or device.type in _broken:
        return None
    key = (device.type, formula, kernel)
    if key not in _fused:
        example = _example(device, pair_arguments)
        formula(kernel, *example)  # an error here is the formula's own: it must not pass for the compiler's
        try:
            _fused[key] = _compile(formula, kernel)
            _fused[key](kernel, *example)
        except Exception as error:  # from any stage of torch.compile: they share no base class
            _broken.add(device.type)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"torch.compile does not work here ({reason[:200]}): distances on {device.type} run unfused, which is slow",
                          RuntimeWarning, stacklevel=2)
            return None
    return _fused[key]


def _compile(formula, kernel):
    # A code object of its own: torch.compile counts recompilations per code object, and gives up after a few.
    code = formula.__code__.replace(co_name=f"{formula.__name__.strip('_')}_{type(kernel).__name__}")
    return torch.compile(types.FunctionType(code, formula.__globals__), dynamic=True)


def _example(device, pair_arguments):
    # Sizes all different and not special: torch.compile takes equal sizes for one and the same, and 1 for a constant.
    n, m, width = 48, 520, 136
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(n, width), (m, width)] + [(n, m)] * pair_arguments
    return [torch.rand(shape, generator=generator, device=device) for shape in shapes]
