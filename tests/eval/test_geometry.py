import time

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from eval.geometry import PrototypeGeometry, fixed_sample, nearest_distances, nearest_words
from heads import HEADS, build_head


def head_of(name="euclidean", vocab_size=300, n_embd=12, **options):
    torch.manual_seed(0)
    return build_head(
        name,
        n_embd=n_embd,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size + 20,
        **({} if name == "linear" else {"exponent": 5.0}) | options,
    )


def prototypes(head):
    return head.weight[: head.vocab_size].detach().double().numpy()


@pytest.mark.parametrize("name, metric", [("euclidean", "euclidean"), ("cosine", "cosine")])
@pytest.mark.parametrize("hidden_scale", [1.0, 0.05])
def test_nearest_distances_are_scipys(name, metric, hidden_scale):
    head = head_of(name, hidden_scale=hidden_scale)  # which concerns hidden states, not prototypes
    between = cdist(prototypes(head), prototypes(head), metric)
    np.fill_diagonal(between, np.inf)
    ids = torch.tensor([0, 17, 299])
    np.testing.assert_allclose(nearest_distances(head, ids), between[ids].min(1), rtol=1e-4)
    for word in (0, 17, 299):
        expected = np.argsort(between[word])[:10]
        found = nearest_words(head, word)
        assert [other for other, _ in found] == list(expected)
        np.testing.assert_allclose([distance for _, distance in found], between[word][expected], rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in HEADS if name != "linear"])
def test_every_distance_head_measures_its_own_prototypes(name):
    head = head_of(name, vocab_size=40, hidden_scale=0.1)
    between = head.definition(head.weight[:40], head.weight[:40]).detach().double().numpy()
    np.fill_diagonal(between, np.inf)
    np.testing.assert_allclose(nearest_distances(head, torch.arange(40)), between.min(1), rtol=2e-3)


def test_padded_rows_are_nobodys_neighbours():
    head = head_of()
    with torch.no_grad():
        head.weight[300:] = head.weight[5]
    assert all(other < 300 for other, _ in nearest_words(head, 5))
    assert nearest_distances(head, torch.tensor([5])).item() > 0.01


def test_a_linear_head_has_norms_but_no_distances():
    head = head_of("linear")
    figures = PrototypeGeometry().measure(head)
    assert figures["nearest_distance_mean"] is None
    norms = np.linalg.norm(prototypes(head), axis=1)
    for percent, value in figures["norm_quantiles"].items():
        assert value == pytest.approx(np.percentile(norms, int(percent)), rel=1e-5)
    assert figures["norm_mean"] == pytest.approx(norms.mean(), rel=1e-6)
    similar = prototypes(head) @ prototypes(head)[7]
    similar[7] = -np.inf
    assert [other for other, _ in nearest_words(head, 7, 3)] == list(np.argsort(-similar)[:3])


def test_drift_is_the_share_that_moved_by_less_than_a_hundredth():
    head, geometry = head_of(), PrototypeGeometry()
    assert geometry.measure(head)["moved_less_share"] is None  # nothing to compare with yet
    with torch.no_grad():
        head.weight[:75] *= 1.02
        head.weight[75:150] *= 1.005
    assert geometry.measure(head)["moved_less_share"] == pytest.approx(0.75)
    assert geometry.measure(head)["moved_less_share"] == 1.0


def test_the_sample_is_spread_and_fixed():
    assert torch.equal(fixed_sample(50257), fixed_sample(50257))
    ids = fixed_sample(50257)
    assert len(ids.unique()) == 1024 and ids[0] == 0 and ids[-1] == 50256
    assert torch.equal(fixed_sample(257), torch.arange(257))


def test_measuring_changes_nothing():
    head = head_of()
    before, state = head.weight.detach().clone(), torch.get_rng_state()
    PrototypeGeometry().measure(head)
    assert torch.equal(head.weight, before) and head.weight.grad is None and torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_real_vocabulary_takes_seconds():
    head = head_of("cosine", vocab_size=50257, n_embd=768)
    started = time.process_time()
    PrototypeGeometry().measure(head)
    assert time.process_time() - started < 20
