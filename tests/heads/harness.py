"""What the tests of heads share: the cases, the float64 reference, and a comparison that a wrong gradient cannot pass."""

import copy
import math

import torch
from torch.overrides import TorchFunctionMode

from heads import build_head
from heads.kernels.inner_product import bfloat16_operands

DISTANCES = [
    ("euclidean", {}),
    ("manhattan", {}),
    ("chebyshev", {}),
    ("chebyshev", {"smooth": 3.0}),
    ("minkowski", {"p": 1.5}),
    ("minkowski", {"p": 3.0}),
    ("minkowski", {"p": 12.0}),
    ("cosine", {}),
    ("hamming", {}),
    ("hamming", {"relaxation": "hard"}),
    ("hamming", {"relaxation": "gumbel", "temperature": 0.7}),
    ("canberra", {}),
    ("canberra", {"min_denominator": 0.5}),
    ("bray_curtis", {}),
    ("bray_curtis", {"normalized": True}),
    ("mahalanobis", {}),
    ("mahalanobis", {"covariance": "cholesky"}),
    ("mahalanobis", {"covariance": "full"}),
]
OWN_SCALE = {"hamming", "smooth", "min_denominator"}  # distances and options that are neither homogeneous nor scale-free
LINKS = [{"exponent": 9.0}, {"exponent": 9.0, "learn_exponent": True}, {"link": "gibbs", "tau": 0.5}]
LINEAR = [("linear", {}), ("linear", {"bias": True})]
HEADS_ONCE = LINEAR + [(name, options | LINKS[0]) for name, options in DISTANCES]
EVERY_HEAD = LINEAR + [(name, options | link) for name, options in DISTANCES for link in LINKS]
FLOOR = 1e-13  # references are floored far below any distance that the tests mean to have


def case_id(value):
    if isinstance(value, dict):
        return ",".join(f"{key}={part}" for key, part in value.items()) or "plain"
    return str(value)


def make_head(name, n_embd, vocab_size, seed=0, **options):
    """A head in evaluation mode whose parameters are all away from their initial values, prototypes N(0, 1), three padded rows."""
    head = build_head(name, n_embd, vocab_size, vocab_size + 3, **options).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if key == "weight":
                parameter.copy_(noise)
            elif key != "log_exponent":
                parameter.add_(noise, alpha=0.2 / math.sqrt(n_embd))
    return head


def batch(tokens, vocab_size, n_embd, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, n_embd, generator=generator), torch.randint(vocab_size, (tokens,), generator=generator)


def reference_logits(head, hidden):
    """The definition, in float64 if head and hidden are: logits (N, V), differentiable."""
    weight = head.weight[: head.vocab_size]
    d = head.definition(hidden * getattr(head, "scale", 1.0), weight)
    if not hasattr(head, "harmonic"):
        return d
    if not head.harmonic:
        return -d / head.settings["tau"]
    exponent = head.log_exponent.exp() if head.settings["learn_exponent"] else head.exponent
    return -exponent * d.clamp(min=FLOOR).log()


def reference_gradients(head, hidden, targets, **options):
    """(loss, gradients by name) of the definition in float64."""
    head = copy.deepcopy(head).double()
    hidden = hidden.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(reference_logits(head, hidden), targets, **options)
    loss.backward()
    return loss.detach(), gradients(head, hidden)


def head_gradients(head, hidden, targets, **options):
    """(loss, gradients by name) of the head itself, in the dtype of hidden."""
    head.zero_grad()
    hidden = hidden.detach().requires_grad_()
    loss = head(hidden, targets, **options)
    loss.backward()
    return loss.detach(), gradients(head, hidden)


def gradients(head, hidden):
    return {"hidden": hidden.grad, **{name: parameter.grad for name, parameter in head.named_parameters()}}


def relative_errors(actual, expected):
    """||actual - expected|| / ||expected|| by name; a gradient that vanishes beside the largest one is measured against that."""
    largest = max(grad.norm() for grad in expected.values())
    return {name: ((actual[name].double() - grad).norm() / max(grad.norm(), 1e-4 * largest)).item() for name, grad in expected.items()}


def assert_gradients_close(actual, expected, tolerance=1e-3):
    """Raises AssertionError unless every gradient is there, finite, and right within `tolerance`."""
    assert set(actual) == set(expected)
    for name, grad in actual.items():
        assert grad is not None, f"{name} has no gradient"
    for name, error in relative_errors(actual, expected).items():
        assert error < tolerance, f"gradient of {name}: relative error {error}"  # also false for NaN


def rounds_operands():
    """Whether this processor rounds the operands of a product that `bfloat16_operands` surrounds."""
    x, y = torch.rand(64, 64) + 1, torch.rand(64, 64) + 1
    with bfloat16_operands():
        product = x @ y
    return ((product - x.double() @ y.double()).abs() > 1e-3).any().item()


class BFloat16Units(TorchFunctionMode):
    """Stands in for `heads.kernels.inner_product.bfloat16_operands` on a processor without matrix units: products as AMX takes them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.mm, torch.Tensor.addmm_):
            into = args[:-2]  # addmm_ adds to its first argument, in float32
            args = (*into, *(operand.bfloat16().float() for operand in args[-2:]))
        return func(*args, **(kwargs or {}))
