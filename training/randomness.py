"""Every random draw is a function of (seed, purpose, step, rank): nothing but the seed and the step has to be stored."""

import hashlib

import torch


def derive(seed: int, purpose: str, step: int = 0, rank: int = 0) -> int:
    """A 63-bit seed for one purpose at one step on one rank; different arguments give unrelated seeds."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_torch(seed: int, purpose: str, step: int = 0, rank: int = 0) -> None:
    """Seeds torch's default generators (CPU and accelerator): initialisation, or the dropout of one step."""
    torch.manual_seed(derive(seed, purpose, step, rank))
