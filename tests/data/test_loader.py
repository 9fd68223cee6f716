import os
import threading
import time

import numpy as np
import pytest
import torch

from commands import InputError
from data.loader import BatchShape, TrainLoader, validation_batches
from data.masking import Masking
from data.token_file import open_dataset

V = 1000
MASKING = Masking(0.15, V, V, (V - 1,))


@pytest.fixture
def make_tokens(write_dataset):
    """make_tokens(n) -> a TokenFile of n ids, random but for the end-of-text ids."""

    def make(n: int):
        ids = np.random.default_rng(n).integers(0, V, n)
        return open_dataset(write_dataset(ids, [1], name=f"{n}")).train

    return make


def all_batches(tokens, shape: BatchShape, step: int, seed: int = 1, masking=None):
    """The micro-batches of every rank in the order of the global batch."""
    ranks = []
    for rank in range(shape.world_size):
        loader = TrainLoader(tokens, shape._replace(rank=rank), seed, masking)
        ranks.append(loader.batches(step))
        loader.close()
    return [ranks[rank][micro] for micro in range(shape.accumulation_steps) for rank in range(shape.world_size)]


def joined(batches, name: str) -> torch.Tensor:
    return torch.cat([getattr(batch, name) for batch in batches])


def test_targets_are_the_next_tokens_of_the_file(make_tokens):
    tokens = make_tokens(5000)
    loader = TrainLoader(tokens, BatchShape(block_size=16, batch_size=4), seed=1)
    (batch,) = loader.batches(0)
    loader.close()
    assert batch.tokens.shape == batch.targets.shape == (4, 16)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64 and batch.positions is None
    text = tokens[:].tolist()
    rows = {tuple(text[at : at + 17]) for at in range(len(text) - 16)}
    for inputs, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        assert (*inputs, targets[-1]) in rows and inputs[1:] == targets[:-1]


@pytest.mark.parametrize("masking", [None, MASKING])
@pytest.mark.parametrize("batch_size, accumulation, world", [(2, 2, 3), (6, 1, 2), (1, 12, 1), (3, 2, 2)])
def test_every_division_of_the_rows_gives_the_same_global_batch(make_tokens, masking, batch_size, accumulation, world):
    tokens = make_tokens(5000)
    (whole,) = all_batches(tokens, BatchShape(16, 12), step=3, masking=masking)
    parts = all_batches(tokens, BatchShape(16, batch_size, accumulation, 0, world), step=3, masking=masking)
    assert len(parts) == accumulation * world
    assert torch.equal(joined(parts, "tokens"), whole.tokens)
    assert torch.equal(joined(parts, "targets"), whole.targets)


def test_a_step_is_a_function_of_seed_and_step(make_tokens):
    loader = TrainLoader(make_tokens(5000), BatchShape(16, 4), seed=1)
    forwards = [loader.batches(step)[0].tokens for step in range(5)]
    backwards = [loader.batches(step)[0].tokens for step in reversed(range(5))][::-1]
    loader.close()
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not any(torch.equal(forwards[0], other) for other in forwards[1:])
    other = TrainLoader(loader.tokens, loader.shape, seed=2)
    assert not torch.equal(other.batches(0)[0].tokens, forwards[0])
    other.close()


def test_ranks_share_no_batch_in_twenty_steps(make_tokens):
    tokens = make_tokens(100_000)
    seen = {}
    for rank in range(4):
        loader = TrainLoader(tokens, BatchShape(64, 4, 2, rank, 4), seed=1)
        for step in range(20):
            for batch in loader.batches(step):
                seen[batch.tokens.numpy().tobytes()] = rank
        loader.close()
    assert len(seen) == 4 * 20 * 2


def test_starts_cover_the_file_to_its_last_token(make_tokens):
    tokens = make_tokens(19)
    loader = TrainLoader(tokens, BatchShape(16, 64), seed=1)
    (batch,) = loader.batches(0)
    loader.close()
    text = tokens[:].tolist()
    assert {tuple(row) for row in batch.tokens.tolist()} == {tuple(text[at : at + 16]) for at in range(3)}
    assert text[-1] in batch.targets[:, -1].tolist()


def test_masked_batches_hold_gathered_targets(make_tokens):
    tokens = make_tokens(5000)
    (causal,) = all_batches(tokens, BatchShape(32, 8), step=3, seed=5)
    (masked,) = all_batches(tokens, BatchShape(32, 8), step=3, seed=5, masking=MASKING)
    inputs, targets, positions = map(torch.from_numpy, MASKING.train(causal.tokens.numpy(), 5, 3, range(8)))
    assert torch.equal(masked.tokens, inputs) and torch.equal(masked.targets, targets) and torch.equal(masked.positions, positions)
    assert torch.equal(causal.tokens.flatten()[masked.positions], masked.targets)  # the same windows, before masking
    assert (masked.tokens == V).sum() > 0


def test_the_next_step_is_read_ahead_in_a_thread(make_tokens, monkeypatch):
    tokens = make_tokens(5000)
    readers = []
    monkeypatch.setattr(tokens, "rows", lambda *window: readers.append(threading.current_thread()) or type(tokens).rows(tokens, *window))
    loader = TrainLoader(tokens, BatchShape(16, 4), seed=1)
    loader.batches(0)
    deadline = time.monotonic() + 30
    while len(readers) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    loader.close()
    assert len(readers) == 2 and threading.main_thread() not in readers
    assert not any(thread.is_alive() for thread in readers)


def test_an_error_of_the_thread_reaches_the_caller(make_tokens):
    tokens = make_tokens(5000)
    loader = TrainLoader(tokens, BatchShape(16, 4), seed=1)
    os.truncate(tokens.path, 20)  # before the thread reads: a mapping that is cut under a read is a bus error
    with pytest.raises(InputError, match="has shrunk"):
        loader.batches(0)
    loader.close()


def test_a_file_shorter_than_a_block_is_an_input_error(make_tokens):
    tokens = make_tokens(16)
    with pytest.raises(InputError, match=r"train.bin holds 16 tokens, fewer than the 17 that block_size = 16 needs"):
        TrainLoader(tokens, BatchShape(16, 4), seed=1)
    with pytest.raises(InputError, match=r"holds 16 tokens, fewer than the 17 that block_size = 16 needs"):
        validation_batches(tokens, BatchShape(16, 4))
    with pytest.raises(InputError, match=r"holds 16 tokens, fewer than the 17 that block_size = 17 needs"):
        validation_batches(tokens, BatchShape(17, 4), masking=MASKING)
    assert len(list(validation_batches(tokens, BatchShape(16, 4), masking=MASKING))) == 1


@pytest.mark.parametrize("n", [17, 33, 34, 100, 1000])
@pytest.mark.parametrize("batch_size, world", [(1, 1), (3, 1), (4, 3), (100, 2)])
def test_validation_scores_every_next_token_once(make_tokens, n, batch_size, world):
    tokens = make_tokens(n)
    windows = {}
    for rank in range(world):
        for batch in validation_batches(tokens, BatchShape(16, batch_size, rank=rank, world_size=world)):
            assert len(batch.tokens) <= batch_size and torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
            for row, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
                windows[tuple(row)] = targets
    text = tokens[:].tolist()
    expected = {tuple(text[at : at + 16][: n - 1 - at]): text[at + 1 : at + 17] for at in range(0, n - 1, 16)}
    assert windows == expected


def test_ranks_take_every_other_window_and_one_takes_the_tail(make_tokens):
    tokens = make_tokens(16 * 5 + 4)
    shapes = [[batch.tokens.shape for batch in validation_batches(tokens, BatchShape(16, 2, rank=rank, world_size=2))] for rank in (0, 1)]
    assert shapes == [[(2, 16), (1, 16)], [(2, 16), (1, 3)]]


@pytest.mark.parametrize("limit, targets", [(32, 32), (40, 40), (5, 5), (10_000, 999)])
def test_the_limit_counts_targets_from_the_start(make_tokens, limit, targets):
    tokens = make_tokens(1000)
    batches = list(validation_batches(tokens, BatchShape(16, 4), limit=limit))
    assert torch.cat([batch.targets.flatten() for batch in batches]).tolist() == tokens[1 : targets + 1].tolist()


@pytest.mark.parametrize("batch_size, world", [(1, 1), (3, 1), (2, 3)])
def test_validation_masks_are_the_same_for_every_batch_size_and_rank(make_tokens, batch_size, world):
    tokens = make_tokens(16 * 20 + 5)

    def scored(batch_size, world):
        rows = []
        for rank in range(world):
            for batch in validation_batches(tokens, BatchShape(16, batch_size, rank=rank, world_size=world), masking=MASKING):
                rows += [tuple(row) for row in batch.tokens.tolist()]
        return sorted(rows)

    assert scored(batch_size, world) == scored(20, 1)
    assert len(scored(20, 1)) == 21


def test_a_batch_with_nothing_to_score_is_empty_not_an_error(write_dataset):
    tokens = open_dataset(write_dataset([V - 1] * 40, [1])).train
    (batch,) = all_batches(tokens, BatchShape(16, 2), step=0, masking=MASKING)
    assert batch.targets.shape == batch.positions.shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("masking", [None, MASKING])
def test_batches_on_a_gpu_are_those_of_the_cpu(make_tokens, masking):
    tokens = make_tokens(5000)
    loaders = [TrainLoader(tokens, BatchShape(16, 4, 2), 1, masking, device) for device in ("cpu", "cuda")]
    for step in range(10):
        for here, there in zip(*(loader.batches(step) for loader in loaders), strict=True):
            assert there.tokens.device.type == "cuda"
            assert all(a is b is None or torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
    for loader in loaders:
        loader.close()
