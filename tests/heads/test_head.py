import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F

from heads import HEADS, build_head
from tests.heads.harness import batch, head_gradients, make_head

every_head = pytest.mark.parametrize("name", HEADS)
OPTIONS = {name: {} if name == "linear" else {"exponent": 9.0} for name in HEADS}


@every_head
def test_reductions_and_ignored_targets(name):
    head = make_head(name, 33, 101, **OPTIONS[name])
    hidden, targets = batch(12, 101, 33)
    losses = F.nll_loss(head.log_probs(hidden), targets, reduction="none")
    targets[[2, 7]] = -100
    losses[[2, 7]] = 0
    none = head(hidden.view(3, 4, 33), targets.view(3, 4), reduction="none")
    assert none.shape == (3, 4) and none[0, 2] == none[1, 3] == 0
    torch.testing.assert_close(none.flatten(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head(hidden, targets, reduction="sum"), losses.sum())
    torch.testing.assert_close(head(hidden, targets), losses.sum() / 10)
    hidden[2] = math.nan  # an ignored position may hold anything
    loss, grads = head_gradients(head, hidden, targets)
    kept = targets != -100
    expected_loss, expected = head_gradients(head, hidden[kept], targets[kept])
    assert loss == expected_loss
    assert torch.equal(grads["hidden"][kept], expected["hidden"]) and (grads["hidden"][~kept] == 0).all()


@every_head
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_to_score_is_zero_and_attached(name, reduction):
    options = {} if name == "linear" else {"learn_exponent": True}  # not calibrated, either
    for hidden, targets in ((torch.randn(5, 8), torch.full((5,), -100)), (torch.randn(0, 8), torch.zeros(0, dtype=torch.long))):
        head = build_head(name, 8, 16, **options)
        hidden.requires_grad_()
        loss = head(hidden, targets, reduction=reduction).sum()
        loss.backward()
        assert loss == 0 and (hidden.grad == 0).all()
        for key, parameter in head.named_parameters():
            assert parameter.grad is not None and (parameter.grad == 0).all(), key


@every_head
def test_label_smoothing_spreads_over_the_words(name):
    head = make_head(name, 33, 101, **OPTIONS[name])
    hidden, targets = batch(7, 101, 33)
    expected = F.cross_entropy(head.log_probs(hidden)[:, :101].double(), targets, label_smoothing=0.1)
    torch.testing.assert_close(head(hidden, targets, label_smoothing=0.1).double(), expected, rtol=1e-5, atol=1e-5)


@every_head
def test_padded_rows_have_no_probability_and_no_gradient(name):
    head = make_head(name, 33, 101, **OPTIONS[name])
    hidden, targets = batch(7, 101, 33)
    loss, grads = head_gradients(head, hidden, targets)
    assert (grads["weight"][101:] == 0).all()
    with torch.no_grad():
        head.weight[101:] = hidden[:3]  # as near as can be
    assert head(hidden, targets) == loss
    log_probs = head.log_probs(hidden.view(7, 1, 33))
    assert log_probs.shape == (7, 1, 104) and (log_probs[..., 101:] == -math.inf).all()


def test_bad_input_names_the_argument():
    head = build_head("cosine", 8, 16, exponent=3.0)
    hidden, targets = torch.randn(4, 8), torch.tensor([1, 2, 3, 15])
    cases = [
        ("hidden", dict(hidden=torch.ones(4, 8, dtype=torch.long), targets=targets)),
        ("hidden.*n_embd = 8", dict(hidden=torch.randn(4, 7), targets=targets)),
        ("targets", dict(hidden=hidden, targets=targets[:3])), ("targets", dict(hidden=hidden, targets=targets.float())),
        ("target 16 .*V - 1 = 15", dict(hidden=hidden, targets=targets + 1)), ("target -1 ", dict(hidden=hidden, targets=targets - 2)),
        ("reduction", dict(hidden=hidden, targets=targets, reduction="max")),
        ("label_smoothing", dict(hidden=hidden, targets=targets, label_smoothing=1.0)),
    ]
    for message, arguments in cases:
        with pytest.raises(ValueError, match=message):
            head(**arguments)
    with pytest.raises(ValueError, match="hidden"):
        head.log_probs(torch.ones(4, 8, dtype=torch.int32))


@every_head
def test_every_parameter_gets_a_gradient_and_a_second_backward_agrees(name):
    options = {"bias": True} if name == "linear" else {"exponent": 9.0, "learn_exponent": True}
    head = make_head(name, 33, 101, **options)
    hidden, targets = batch(7, 101, 33)
    loss = head(hidden, targets)
    loss.backward(retain_graph=True)
    first = {key: parameter.grad.clone() for key, parameter in head.named_parameters()}
    loss.backward()
    for key, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * first[key], rtol=1e-4, atol=1e-6)


@every_head
def test_gradient_accumulation_equals_the_whole_batch(name):
    head = make_head(name, 33, 101, **OPTIONS[name])
    hidden, targets = batch(12, 101, 33)
    _, whole = head_gradients(head, hidden, targets)
    head.zero_grad()
    for part in range(4):
        rows = slice(3 * part, 3 * part + 3)
        (head(hidden[rows], targets[rows], reduction="sum") / 12).backward()
    torch.testing.assert_close(head.weight.grad, whole["weight"], rtol=1e-4, atol=1e-6)


@every_head
def test_state_dict_copy_and_tying(name):
    head = make_head(name, 33, 101, **OPTIONS[name])
    hidden, targets = batch(7, 101, 33)
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    other = build_head(name, 33, 101, 104, **OPTIONS[name])
    other.load_state_dict(torch.load(file, weights_only=True))
    assert head(hidden, targets) == other(hidden, targets) == copy.deepcopy(head)(hidden, targets)
    embedding = torch.nn.Embedding(104, 33)
    head.weight = embedding.weight
    head(embedding(targets), targets.roll(1)).backward()
    assert embedding.weight.grad.abs().sum() > 0


@every_head
def test_no_gradient_work_without_gradients(name):
    head = make_head(name, 33, 101, **OPTIONS[name])
    hidden, targets = batch(7, 101, 33)
    with torch.no_grad():
        loss = head(hidden, targets)
    assert not loss.requires_grad and loss == head(hidden, targets).detach()
    assert head(hidden, targets).requires_grad


@pytest.mark.parametrize("name", HEADS)
def test_no_hidden_states_have_no_log_probabilities_and_no_distances(name):
    head = build_head(name, n_embd=4, vocab_size=9, padded_vocab_size=11, **({} if name == "linear" else {"exponent": 3.0}))
    empty = torch.zeros(2, 0, 4)
    assert head.log_probs(empty).shape == (2, 0, 11)
    if name != "linear":
        assert head.distances(empty).shape == (2, 0, 11)


@pytest.mark.parametrize("name", ["cosine", "hamming", "bray_curtis"])
def test_a_second_derivative_is_refused_rather_than_incomplete(name):
    head = build_head(name, n_embd=4, vocab_size=9, exponent=3.0)
    hidden = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.grad(head(hidden, torch.arange(5)), hidden, create_graph=True)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["linear", "cosine", "manhattan"])
def test_a_compiled_model_leaves_its_head_as_it_is(name, autocast):
    backbone, head = torch.nn.Linear(8, 33), make_head(name, 33, 101, **({} if name == "linear" else {"exponent": 9.0}))

    def model(inputs, targets):
        return 2 * head(backbone(inputs).tanh(), targets)

    inputs, targets = batch(7, 101, 8)
    results = []
    for run in (model, torch.compile(model)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = run(inputs, targets)
        loss.backward()
        results.append((loss.detach(), backbone.weight.grad, head.weight.grad))
        backbone.weight.grad = head.weight.grad = None
    torch.testing.assert_close(*results, rtol=2e-2 if autocast else 1e-5, atol=1e-3 if autocast else 1e-6)
