import time

import numpy as np
import pytest
from scipy import stats

from commands import InputError
from data.masking import Masking
from data.token_file import DatasetMeta

V, EOT, MASK = 1000, 999, 1000


@pytest.fixture
def masking() -> Masking:
    return Masking(0.15, MASK, V, (EOT,))


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """(rows, length), one in fifty of them the end-of-text id."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, V - 1, (rows, length))
    return np.where(random.random(ids.shape) < 0.02, EOT, ids)


def test_statistics_on_100_000_tokens_are_within_three_sigma(masking):
    original = np.random.default_rng(3).integers(0, V - 1, (200, 500))
    inputs, targets, positions = masking.train(original, 1, 0, range(200))
    n = len(positions)
    assert n == 200 * 75  # 15 % of 500, exactly, in every row
    seen = inputs.ravel()[positions]
    masked, kept = seen == MASK, seen == targets
    ordinary = V - 1
    chance = 0.1 / ordinary  # a random id may be the original
    for share, expected in ((masked.mean(), 0.8), (kept.mean(), 0.1 + chance), ((~masked & ~kept).mean(), 0.1 - chance)):
        assert abs(share - expected) < 3 * np.sqrt(expected * (1 - expected) / n)
    places = np.bincount(positions % 500, minlength=500)  # each column is selected in 30 of the 200 rows, on average
    assert stats.chisquare(places).pvalue > 1e-3
    replaced = seen[~masked & ~kept]
    assert stats.kstest(replaced / ordinary, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("fraction", [0.01, 0.15, 0.5, 1.0])
def test_every_row_gets_the_exact_count(fraction):
    masking = Masking(fraction, MASK, V, (EOT,))
    original = tokens(64, 67)
    original[5] = EOT  # nothing to select
    original[6, 1:] = EOT  # one position
    positions = masking.train(original, 1, 0, range(64))[2]
    counts = np.bincount(positions // 67, minlength=64)
    for row, count in zip(original, counts, strict=True):
        selectable = sum(token != EOT for token in row.tolist())
        assert count == (max(1, round(fraction * selectable)) if selectable else 0)


def test_targets_are_the_original_tokens_and_nothing_else_changes(masking):
    original = tokens(16, 128)
    before = original.copy()
    inputs, targets, positions = masking.train(original, 1, 0, range(16))
    assert np.array_equal(original, before)
    assert np.array_equal(targets, original.ravel()[positions])
    assert np.all(np.diff(positions) > 0)
    elsewhere = np.setdiff1d(np.arange(original.size), positions)
    assert np.array_equal(inputs.ravel()[elsewhere], original.ravel()[elsewhere])


def test_special_ids_are_neither_selected_nor_put_in():
    masking = Masking(0.9, 5, V, (EOT, 7))  # the mask id is one of the ordinary ids, as in the published setting
    original = tokens(64, 200)
    original[:, ::3] = 5
    original[:, 1::3] = 7
    inputs, targets, positions = masking.train(original, 1, 0, range(64))
    assert not np.isin(targets, (5, 7, EOT)).any()
    put_in = inputs.ravel()[positions]
    assert not np.isin(put_in, (7, EOT)).any()
    assert put_in.max() < V


def test_random_replacements_reach_every_ordinary_id():
    masking = Masking(1.0, 12, 12, (11,))
    original = np.zeros((100, 200), dtype=np.int64)
    inputs = masking.train(original, 1, 0, range(100))[0]
    assert set(np.unique(inputs)) == {*range(11), 12}


def test_id_zero_counts(masking):
    inputs, targets, positions = masking.train(np.zeros((1, 100), dtype=np.int64), 1, 0, [0])
    assert len(targets) == 15 and not targets.any()


def test_slices_of_the_global_batch_agree_with_the_whole(masking):
    original = tokens(12, 64)
    inputs, targets, _ = masking.train(original, 1, 4, range(12))
    for rows in ([0], [3, 4, 5], [11, 2]):
        part_inputs, part_targets, _ = masking.train(original[rows], 1, 4, rows)
        assert np.array_equal(part_inputs, inputs[rows])
    parts = [masking.train(original[at : at + 3], 1, 4, range(at, at + 3)) for at in range(0, 12, 3)]
    assert np.array_equal(np.concatenate([part[1] for part in parts]), targets)


def test_masks_follow_seed_and_step(masking):
    original = tokens(4, 256)
    first = masking.train(original, 1, 0, range(4))[2]
    assert np.array_equal(first, masking.train(original, 1, 0, range(4))[2])
    for seed, step in ((2, 0), (1, 1)):
        assert not np.array_equal(first, masking.train(original, seed, step, range(4))[2])


def test_validation_masks_depend_on_the_window_only(masking):
    original = tokens(6, 64)
    whole = masking.validation(original, range(6))[0]
    again = Masking(0.15, MASK, V, (EOT,)).validation(original[4:], [4, 5])[0]
    assert np.array_equal(whole[4:], again)
    assert not np.array_equal(masking.validation(original[:1], [0])[2], masking.validation(original[:1], [1])[2])


def test_a_bert_sized_batch_takes_milliseconds():
    masking = Masking(0.15, 50257, 50257, (50256,))
    original = np.random.default_rng(0).integers(0, 50257, (38, 512))
    seconds = []
    for step in range(10):
        start = time.perf_counter()
        masking.train(original, 1, step, range(38))
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02  # 2 ms where this was written


def test_for_dataset_takes_the_datasets_mask_id_unless_told():
    meta = DatasetMeta("uint16", vocab_size=257, max_id=256, train_tokens=9, val_tokens=9, mask_token_id=257, special_ids=(256,))
    assert Masking.for_dataset(meta, 0.15) == Masking(0.15, 257, 257, (256,))
    assert Masking.for_dataset(meta, 0.15, mask_token_id=103).mask_token_id == 103
    assert Masking.for_dataset(meta, 0.15, mask_token_id=0).mask_token_id == 0


@pytest.mark.parametrize(
    "arguments, named",
    [((0.0, 5, 10), "mask_fraction"), ((1.5, 5, 10), "mask_fraction"), ((0.15, -1, 10), "mask_token_id"), ((0.15, 0, 1), "no ordinary id")],
)
def test_impossible_settings_are_input_errors(arguments, named):
    with pytest.raises(InputError, match=named):
        Masking(*arguments)
