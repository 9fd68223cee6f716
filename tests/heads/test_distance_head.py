import math

import pytest
import torch

from heads import HEADS, build_head, distance_head
from heads.distances.euclidean import Euclidean
from heads.distances.manhattan import Manhattan
from tests.heads.harness import batch, make_head

DISTANCES = [name for name in HEADS if name != "linear"]


def test_the_exponent_is_on_the_distance_not_on_its_square():
    head = build_head("euclidean", 1, 3, exponent=4.0)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0], [2.0], [4.0]]))
    p = head.log_probs(torch.zeros(1, 1)).exp()[0]
    torch.testing.assert_close(p, torch.tensor([0.938, 0.059, 0.004]), rtol=0, atol=1e-3)


def test_named_exponents():
    assert build_head("cosine", 64, 16, exponent="dim").exponent_value == 64
    assert build_head("cosine", 64, 16, exponent="sqrt_dim").exponent_value == 8
    assert build_head("cosine", 64, 16, exponent=3).exponent_value == 3
    assert build_head("cosine", 64, 16, exponent=3, learn_exponent=True).exponent_value == pytest.approx(3, rel=1e-6)
    assert build_head("cosine", 64, 16).exponent_value is None
    assert build_head("cosine", 64, 16, link="gibbs").exponent_value is None


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("name", DISTANCES)
def test_calibration_gives_the_logits_their_spread(name, learn):
    head = build_head(name, 48, 301, 320, exponent_spread=0.8, learn_exponent=learn)
    hidden, targets = batch(64, 301, 48)
    assert head.needs_calibration and head.options()["exponent"] == "auto"
    head.calibrate(hidden)
    assert not head.needs_calibration
    spread = head.log_probs(hidden)[:, :301].double().var(1, correction=0).mean().sqrt().item()
    assert spread == pytest.approx(0.8, rel=1e-4)
    again = build_head(name, 48, 301, 320, exponent_spread=0.8, learn_exponent=learn)
    again.load_state_dict(head.state_dict())
    assert not again.needs_calibration and again.exponent_value == head.exponent_value
    assert again(hidden, targets) == head(hidden, targets)


def test_calibration_depends_on_the_union_of_hidden_states_only():
    hidden, _ = batch(60, 301, 48)
    values = []
    for parts in ([hidden], list(hidden.split(7)), [hidden[:1], hidden[1:].view(1, 59, 48)], [hidden[:0], hidden]):
        head = make_head("euclidean", 48, 301, hidden_scale="auto")
        head.calibrate(parts)
        values.append((head.exponent_value, head.scale.item()))
    whole_exponent, whole_scale = values[0]
    for exponent, scale in values:
        assert exponent == pytest.approx(whole_exponent, rel=1e-6) and scale == pytest.approx(whole_scale, rel=1e-6)


def test_calibration_sums_over_processes():
    hidden, _ = batch(60, 301, 48)
    whole, first, second = (make_head("euclidean", 48, 301) for _ in range(3))
    whole.calibrate(hidden)
    sums = []
    first.calibrate(hidden[:13], reduce=lambda totals: sums.append(totals.clone()))
    second.calibrate(hidden[13:], reduce=lambda totals: totals.add_(sums[0]))
    assert second.exponent_value == pytest.approx(whole.exponent_value, rel=1e-6)
    assert first.exponent_value != pytest.approx(whole.exponent_value, rel=1e-6)


def test_hidden_scale():
    hidden, targets = batch(7, 101, 33)
    scaled = make_head("manhattan", 33, 101, exponent=9.0, hidden_scale=0.02)
    plain = make_head("manhattan", 33, 101, exponent=9.0)
    assert torch.equal(scaled.log_probs(hidden), plain.log_probs(hidden * 0.02))
    auto = make_head("manhattan", 33, 101, exponent=9.0, hidden_scale="auto")
    auto.calibrate(hidden * 50)
    rms = lambda rows: rows.square().mean().sqrt().item()  # noqa: E731
    assert rms(hidden * 50 * auto.scale) == pytest.approx(rms(auto.weight[:101]), rel=1e-5)


def test_a_head_used_at_once_calibrates_itself_on_what_it_sees():
    hidden, targets = batch(64, 301, 48)
    head, other = make_head("cosine", 48, 301), make_head("cosine", 48, 301)
    other.calibrate(hidden)
    assert head(hidden, targets) == other(hidden, targets)
    first = head.exponent_value
    head(hidden * 2 + 1, targets)
    assert head.exponent_value == first == other.exponent_value


def test_calibration_refuses_what_has_no_spread():
    head = build_head("euclidean", 8, 16)
    with pytest.raises(ValueError, match="no hidden states"):
        head.calibrate(torch.zeros(0, 8))
    with torch.no_grad():
        head.weight.fill_(1.0)
    with pytest.raises(ValueError, match="auto"):
        head.calibrate(torch.randn(5, 8))
    with pytest.raises(ValueError, match="auto"):
        make_head("euclidean", 8, 16).calibrate(torch.full((5, 8), math.nan))


def test_options_hold_what_applies():
    harmonic = build_head("cosine", 8, 16).options()
    gibbs = build_head("cosine", 8, 16, link="gibbs").options()
    assert harmonic == {"link": "harmonic", "exponent": "auto", "exponent_spread": 0.5, "learn_exponent": False, "hidden_scale": 1.0}
    assert gibbs == {"link": "gibbs", "tau": 0.1, "hidden_scale": 1.0}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_and_shapes(name):
    head = make_head(name, 33, 101)
    hidden, _ = batch(6, 101, 33)
    d = head.distances(hidden.view(2, 3, 33))
    assert d.shape == (2, 3, 104) and d.dtype == torch.float32
    torch.testing.assert_close(d.view(6, 104).double(), head.double().definition(hidden.double(), head.weight), rtol=1e-5, atol=1e-6)
    for factor in (1e-18, 1e18):  # in the distance's own units, also where the kernel works in others
        if name in ("euclidean", "minkowski", "mahalanobis", "cosine"):
            big = make_head(name, 33, 101)
            with torch.no_grad():
                big.weight *= factor
            expected = d * (1 if name == "cosine" else factor)
            torch.testing.assert_close(big.distances(hidden.view(2, 3, 33) * factor), expected, rtol=1e-4, atol=0)


def test_hidden_states_that_are_all_zero_calibrate_no_scale():
    head = build_head("euclidean", n_embd=4, vocab_size=9, exponent=3.0, hidden_scale="auto")
    with pytest.raises(ValueError, match="hidden_scale .auto.: cannot be calibrated"):
        head.calibrate(torch.zeros(5, 4))
    assert head.needs_calibration


def test_a_head_put_back_to_its_beginning_calibrates_again():
    hidden, targets = batch(30, 101, 48)
    for options in ({}, {"learn_exponent": True}, {"hidden_scale": "auto"}):
        head = make_head("euclidean", 48, 101, **options)
        start = {key: value.clone() for key, value in head.state_dict().items()}
        loss, exponent = head(hidden, targets).item(), head.exponent_value
        head.load_state_dict(start)
        assert head.exponent_value is None
        assert head(hidden, targets).item() == loss and head.exponent_value == exponent


def test_a_functional_call_leaves_the_head_itself_to_be_calibrated():
    hidden, targets = batch(30, 101, 48)
    head = make_head("cosine", 48, 101)
    copies = {key: value.clone() for key, value in [*head.named_parameters(), *head.named_buffers()]}
    loss = torch.func.functional_call(head, copies, (hidden, targets)).item()
    assert head.needs_calibration and head(hidden, targets).item() == loss and not head.needs_calibration


def test_a_failed_calibration_is_not_taken_for_one():
    head = make_head("euclidean", 48, 101)
    _, targets = batch(30, 101, 48)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be calibrated"):
            head(torch.full((30, 48), torch.nan), targets)


@pytest.mark.parametrize("options", [{}, {"exponent": 3.0}, {"learn_exponent": True}, {"exponent": "dim", "hidden_scale": 0.02}, {"link": "gibbs"}])
@pytest.mark.parametrize("name", [*DISTANCES, "mahalanobis:cholesky", "mahalanobis:full"])
def test_reset_parameters_makes_a_new_head(name, options):
    name, _, covariance = name.partition(":")
    options = options | ({"covariance": covariance} if covariance else {})
    torch.manual_seed(3)
    new = build_head(name, 8, 11, 16, **options)
    with torch.device("meta"):
        head = build_head(name, 8, 11, 16, **options)
    head.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in head.state_dict().values():
            tensor.fill_(7)
    torch.manual_seed(3)
    head.reset_parameters()
    for key, value in new.state_dict().items():
        assert torch.equal(head.state_dict()[key], value), key


def test_a_metric_asks_for_a_kernel_that_has_one():
    class Weighted(Manhattan):
        def metric(self):
            return torch.ones(self.n_embd)

    hidden, targets = batch(3, 11, 8)
    with pytest.raises(ValueError, match="has no parameter"):
        Weighted(8, 11, exponent=3.0)(hidden, targets)


def test_rows_are_rescaled_after_they_are_mapped(monkeypatch):
    """A map need not be homogeneous. On CUDA rows are always rescaled, on a CPU where powers would leave float32's range."""
    class Softmax(Euclidean):
        def map(self, rows, noise=None):
            return rows.softmax(-1)

    hidden, targets = batch(5, 11, 8)
    torch.manual_seed(0)
    for link in ({"exponent": 3.0}, {"link": "gibbs"}):
        head = Softmax(8, 11, **link)
        before = head(hidden, targets), head.distances(hidden)
        monkeypatch.setattr(distance_head, "_common_unit", lambda x, y, power: torch.tensor(0.25))
        torch.testing.assert_close((head(hidden, targets), head.distances(hidden)), before)
        monkeypatch.undo()


@pytest.mark.parametrize("kept", [20, 0])
def test_calibration_counts_scored_positions_only(kept, monkeypatch):
    """On a CPU ignored positions are dropped before the loss, on CUDA they are set to zero: the exponent must not tell."""
    hidden, targets = batch(60, 101, 48)
    targets[kept:] = -100
    exponents = []
    for on_cuda in (False, True):
        head = make_head("euclidean", 48, 101)
        if on_cuda:
            mask = targets != -100
            monkeypatch.setattr(head, "_scored", lambda targets, shape, mask=mask: (mask, targets.clamp(min=0), mask.float()))
        assert (head(hidden, targets) > 0) == (kept > 0)
        exponents.append(head.exponent_value)
    assert exponents[0] == exponents[1] and (exponents[0] is None) == (kept == 0)
