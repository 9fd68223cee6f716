import torch
import torch.nn.functional as F

from tests.heads.harness import assert_gradients_close, batch, head_gradients, make_head, reference_gradients


def test_it_is_the_cross_entropy_of_a_linear_layer():
    for tokens, words, width in ((1, 3, 2), (7, 509, 33), (127, 509, 33)):
        for bias in (False, True):
            head = make_head("linear", width, words, bias=bias)
            hidden, targets = batch(tokens, words, width)
            loss, grads = head_gradients(head, hidden, targets, label_smoothing=0.1)
            logits = F.linear(hidden.double(), head.weight[:words].double(), head.bias.double() if bias else None)
            torch.testing.assert_close(loss.double(), F.cross_entropy(logits, targets, label_smoothing=0.1), rtol=1e-6, atol=1e-6)
            assert_gradients_close(grads, reference_gradients(head, hidden, targets, label_smoothing=0.1)[1], 1e-5)
            torch.testing.assert_close(head.log_probs(hidden)[:, :words].double(), torch.log_softmax(logits, 1), rtol=1e-5, atol=1e-5)


def test_losses_beyond_the_smallest_float():
    head = make_head("linear", 4, 6)
    hidden, targets = batch(3, 6, 4)
    logits = F.linear(100 * hidden.double(), head.weight[:6].double())
    targets = logits.argmin(1)
    loss, grads = head_gradients(head, 100 * hidden, targets)
    torch.testing.assert_close(loss.double(), F.cross_entropy(logits, targets), rtol=1e-6, atol=1e-4)
    assert loss > 100
    assert_gradients_close(grads, reference_gradients(head, 100 * hidden, targets)[1], 1e-5)
