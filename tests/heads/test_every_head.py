"""What must hold for every head, across distances, options, links and odd shapes."""

import copy
import math

import pytest
import torch

from heads import HEADS, build_head
from heads.kernels import inner_product
from tests.heads.harness import (
    DISTANCES,
    EVERY_HEAD,
    HEADS_ONCE,
    OWN_SCALE,
    BFloat16Units,
    assert_gradients_close,
    batch,
    case_id,
    head_gradients,
    make_head,
    reference_gradients,
    reference_logits,
    relative_errors,
)

every_head = pytest.mark.parametrize("name, options", EVERY_HEAD, ids=case_id)  # distances, options and links
each_once = pytest.mark.parametrize("name, options", HEADS_ONCE, ids=case_id)
every_distance = pytest.mark.parametrize("name, options", DISTANCES, ids=case_id)
SHAPES = [(1, 3, 2), (7, 509, 33), (127, 3, 33), (127, 509, 2)]  # tokens, words, width


@every_head
def test_log_probs_and_gradients_match_the_definition(name, options):
    for tokens, words, width in SHAPES:
        if options.get("relaxation") == "hard" and width == 2:
            continue  # all bits coincide: in test_hamming.py
        head = make_head(name, width, words, **options)
        hidden, targets = batch(tokens, words, width)
        loss, grads = head_gradients(head, hidden, targets)
        expected_loss, expected = reference_gradients(head, hidden, targets)
        torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-4, atol=1e-4)
        assert_gradients_close(grads, expected)
        truth = torch.log_softmax(reference_logits(make_head(name, width, words, **options).double(), hidden.double()), 1)
        log_probs = head.log_probs(hidden)
        likely = truth > math.log(1e-7)
        assert (log_probs[:, :words].double() - truth)[likely].abs().max() < 1e-3
        assert (log_probs.exp().sum(1) - 1).abs().max() < 1e-5
        assert (log_probs[:, words:] == -math.inf).all()


@every_head
def test_gradcheck_in_float64(name, options):
    if options.get("relaxation") == "hard":
        pytest.skip("straight-through: its gradient is another function's, and is compared with that in its own test")
    head = make_head(name, 5, 4, seed=3, **options).double()
    hidden, targets = batch(3, 4, 5, seed=4)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]

    def loss(hidden, *values):
        return torch.func.functional_call(head, dict(zip([key for key, _ in head.named_parameters()], values)), (hidden, targets))

    inputs = [hidden.double().requires_grad_(), *(parameter.detach().clone().requires_grad_() for parameter in parameters)]
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("wrong", ["sign", "double", "one row", "missing", "nan"])
def test_the_comparison_rejects_wrong_gradients(wrong):
    head = make_head("euclidean", 33, 509, exponent=9.0, learn_exponent=True)
    hidden, targets = batch(7, 509, 33)
    _, expected = reference_gradients(head, hidden, targets)
    for name in expected:
        _, grads = head_gradients(head, hidden, targets)
        assert_gradients_close(grads, expected)
        grad = grads[name]
        if wrong == "one row" and grad.dim() < 2:
            continue
        grads[name] = {"sign": -grad, "double": 2 * grad, "missing": None, "nan": grad * math.nan, "one row": grad.clone()}[wrong]
        if wrong == "one row":
            grads[name][int(targets[0]) if name == "weight" else 0] *= -1
        with pytest.raises(AssertionError):
            assert_gradients_close(grads, expected)


@every_head
def test_coincidences_and_extreme_scales_stay_finite(name, options):
    for scale in (1.0, 1e-4, 1e4, 1e18):
        head = make_head(name, 33, 50, **options)
        with torch.no_grad():
            head.weight[5] = head.weight[6]  # duplicate prototypes
            head.weight[7] = 0
            head.weight *= scale
        hidden, _ = batch(6, 50, 33)
        hidden = hidden * scale
        weight = head.weight.detach()
        hidden[0], hidden[1], hidden[2], hidden[3] = weight[5], weight[3], 0, weight[4]
        targets = torch.tensor([5, 30, 7, 4, 7, 9])  # at its target; at another's prototype; both zero; at its target; a zero prototype
        loss, grads = head_gradients(head, hidden, targets)
        assert torch.isfinite(loss), scale
        for key, grad in grads.items():
            assert torch.isfinite(grad).all(), (scale, key)
        assert (head.log_probs(hidden).exp().sum(1) - 1).abs().max() < 1e-5


@every_distance
def test_joint_rescaling_leaves_probabilities_unchanged(name, options):
    if OWN_SCALE & {name, *options}:
        pytest.skip("neither homogeneous nor scale-free")
    head = make_head(name, 33, 101, **options, exponent=20.0)
    hidden, _ = batch(7, 101, 33)
    before = head.log_probs(hidden)
    for factor in (1e-3, 0.3, 1e3):
        scaled = make_head(name, 33, 101, **options, exponent=20.0)
        with torch.no_grad():
            scaled.weight *= factor
        assert (scaled.log_probs(hidden * factor) - before)[:, :101].abs().max() < 1e-3, factor


@every_distance
@pytest.mark.parametrize("apart", [1e-2, 1e-4])
def test_near_pairs_are_neither_floored_nor_rounded_away(name, options, apart):
    if options.get("relaxation") == "hard":
        pytest.skip("its distances are multiples of 1 / D")
    head = make_head(name, 33, 7, **options, exponent=9.0)
    hidden = head.weight.detach()[:7] + apart * batch(7, 7, 33)[0]
    near = head.distances(hidden)[:, :7].diagonal()
    exact = copy.deepcopy(head).double().definition(hidden.double(), head.weight.detach()[:7].double()).diagonal()
    torch.testing.assert_close(near.double(), exact.detach(), rtol=0.02, atol=0)


@every_distance
def test_the_gradient_with_respect_to_ln_d_is_the_responsibilities(name, options):
    """dL/d ln d_k = -n (p_k - 1[k = y]), seen through the exponent: dL/d ln n is the sum over k of that, times ln d_k."""
    head = make_head(name, 33, 101, **options, exponent=7.0, learn_exponent=True)
    hidden, targets = batch(7, 101, 33)
    _, grads = head_gradients(head, hidden, targets, reduction="sum")
    p = head.log_probs(hidden)[:, :101].double().exp()
    p[torch.arange(7), targets] -= 1
    log_d = head.distances(hidden)[:, :101].double().clamp(min=1e-30).log()
    torch.testing.assert_close(grads["log_exponent"].double(), (-7.0 * p * log_d).sum(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("name", HEADS)
def test_the_loss_at_initialisation_is_that_of_guessing(name, untied):
    torch.manual_seed(0)
    head = build_head(name, 64, 1009)
    if not untied:
        torch.nn.init.normal_(head.weight, std=0.02)
    hidden, targets = batch(64, 1009, 64)
    if hasattr(head, "calibrate"):
        head.calibrate(hidden)
    assert abs(head(hidden, targets).item() - math.log(1009)) < 0.7


@every_head
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_hidden_states_that_are_not_finite_give_a_loss_that_is_not(name, options, bad):
    head = make_head(name, 33, 50, **options)
    hidden, targets = batch(4, 50, 33)
    hidden[2, 5] = bad
    assert not torch.isfinite(head(hidden, targets))


@each_once
@pytest.mark.parametrize("units", [False, True], ids=["as here", "matrix units"])
def test_bfloat16_inputs(name, options, units, monkeypatch):
    if units:
        monkeypatch.setattr(inner_product, "bfloat16_operands", BFloat16Units)
    head = make_head(name, 33, 509, **options)
    hidden, targets = batch(127, 509, 33)
    hidden = hidden.bfloat16()
    with torch.no_grad():
        head.weight.copy_(head.weight.bfloat16())
    truth = torch.log_softmax(reference_logits(copy.deepcopy(head).double(), hidden.double()), 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs = head.log_probs(hidden)
        loss, grads = head_gradients(head, hidden, targets)
    likely = truth > math.log(1e-7)
    assert (log_probs[:, :509].double() - truth)[likely].abs().max() < 5e-2
    assert loss.dtype == log_probs.dtype == torch.float32
    assert grads["hidden"].dtype == torch.bfloat16 and grads["weight"].dtype == torch.float32
    _, expected = reference_gradients(head, hidden, targets)
    assert max(relative_errors(grads, expected).values()) < 2e-2


@pytest.mark.parametrize("name", HEADS)
def test_thirty_steps_lower_the_loss(name):
    """A bigram model of this very file's bytes: the head must be able to drive a small embedding."""
    torch.manual_seed(0)
    text = torch.tensor(list(open(__file__, "rb").read()))
    head = build_head(name, 32, 256)
    embedding, norm = torch.nn.Embedding(256, 32), torch.nn.LayerNorm(32)
    if hasattr(head, "calibrate"):
        head.calibrate(norm(embedding(text[:256])))
    optimizer = torch.optim.AdamW([*head.parameters(), *embedding.parameters(), *norm.parameters()], lr=1e-2)
    losses = []
    for step in range(30):
        tokens = text[step * 256 : step * 256 + 257]
        loss = head(norm(embedding(tokens[:-1])), tokens[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 0.4


@pytest.mark.slow
@pytest.mark.parametrize("tokens, words, width", [(17, 50257, 16), (5, 211, 768)])
@each_once
def test_large_dimensions(name, options, tokens, words, width):
    width = max(width, 40) if options.get("relaxation") == "hard" else width  # so that bits do not coincide
    head = make_head(name, width, words, **options)
    hidden, targets = batch(tokens, words, width)
    loss, grads = head_gradients(head, hidden, targets)
    loss_sum, expected = 0.0, None
    for row in range(tokens):  # the oracle in chunks of one token
        part_loss, part = reference_gradients(head, hidden[row : row + 1], targets[row : row + 1])
        loss_sum += part_loss / tokens
        hidden_grad = part.pop("hidden")
        expected = part if expected is None else {key: grad + part[key] for key, grad in expected.items()}
        actual = grads["hidden"][row : row + 1].double() * tokens
        torch.testing.assert_close(actual, hidden_grad, rtol=1e-3, atol=1e-3 * hidden_grad.abs().max())
    torch.testing.assert_close(loss.double(), loss_sum, rtol=1e-4, atol=1e-4)
    grads.pop("hidden")
    assert_gradients_close(grads, {key: grad / tokens for key, grad in expected.items()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens, words, width", [(127, 509, 33), (300, 5003, 64)], ids=["plain", "fused"])
def test_on_cuda_it_is_the_same_head(tokens, words, width, dtype):
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    for name, options in HEADS_ONCE:
        head = make_head(name, width, words, **options)
        hidden, targets = batch(tokens, words, width)
        targets[::5] = -100
        with torch.no_grad():
            head.weight.copy_(head.weight.to(dtype))
            hidden = hidden.to(dtype).float()
        expected_loss, expected = reference_gradients(head, hidden, targets)
        truth = torch.log_softmax(reference_logits(copy.deepcopy(head).double(), hidden.double()), 1)
        head = head.cuda()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss, grads = head_gradients(head, hidden.cuda(), targets.cuda())
            log_probs = head.log_probs(hidden.cuda())[:, :words].double().cpu()
        torch.testing.assert_close(loss.double().cpu(), expected_loss, rtol=tolerance, atol=tolerance)
        assert_gradients_close({key: grad.cpu() for key, grad in grads.items()}, expected, tolerance)
        assert (log_probs - truth)[truth > math.log(1e-7)].abs().max() < (1e-3 if dtype == torch.float32 else 5e-2), (name, options)
