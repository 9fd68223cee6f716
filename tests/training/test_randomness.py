import itertools

import torch

from training.randomness import derive, seed_torch


def test_every_argument_changes_the_seed():
    arguments = list(itertools.product((0, 1, 2**62), ("dropout", "initialisation"), (0, 1, 11), (0, 1)))
    seeds = {derive(*each) for each in arguments}
    assert len(seeds) == len(arguments)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_draw_is_a_function_of_its_arguments_alone():
    seed_torch(7, "dropout", step=3, rank=1)
    first = torch.rand(5)
    torch.rand(100)
    seed_torch(7, "dropout", step=3, rank=1)
    assert torch.equal(torch.rand(5), first)
    seed_torch(7, "dropout", step=4, rank=1)
    assert not torch.equal(torch.rand(5), first)


def test_the_derivation_is_fixed_for_ever():
    """A run resumed under a later version must draw what it would have drawn."""
    assert derive(1337, "dropout", 5, 0) == int.from_bytes(__import__("hashlib").sha256(b"1337/dropout/5/0").digest()[:8], "little") // 2
