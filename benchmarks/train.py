"""What a head costs where it counts: whole updates (forward, backward, clip, AdamW) of one backbone with different heads.

    python -m benchmarks.train config/gpt2_small.toml --heads linear,cosine,euclidean --tokens 4096 --updates 5

The heads take turns, update by update, with `plain`: the same backbone with nn.Linear and F.cross_entropy, which hold all logits, as
nanoGPT does. Tokens are random, so no dataset is needed. Peak memory is that of a process of its own for each.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import runs
from commands import Parser, RunFailed, command
from config import Config, load_config
from data.token_file import DatasetMeta
from model import build_model
from training.optimizer import build_optimizer, gradient_norms
from training.precision import Precision
from training.randomness import seed_torch
from training.record import peak_memory_mb

PLAIN = "plain"


class PlainHead(nn.Module):
    """Linear and cross_entropy over all logits at once."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, self.weight).flatten(0, -2), targets.flatten())


def main(argv: list[str]) -> None:
    asked = parser().parse_args(argv)
    if asked.memory_of:
        update = contestant(asked.memory_of, asked)
        update(), update()
        print(peak_memory_mb(torch.device(asked.device)))
        return
    names = [PLAIN, *asked.heads.split(",")]
    contestants = {name: contestant(name, asked) for name in names}
    milliseconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(asked.updates + 1):
        for name, update in contestants.items():
            started = time.perf_counter()
            update()
            if turn:  # the first warms up
                milliseconds[name].append(1e3 * (time.perf_counter() - started))
    rows = [row(name, milliseconds, asked) for name in names]
    print(f"{asked.config}: {asked.tokens} tokens per update, {asked.device}, {torch.get_num_threads()} threads, median of {asked.updates} [quartiles]")
    print(f"{'head':20s}{'ms':>9s}{'quartiles':>22s}{'tokens/s':>12s}{'x plain':>10s}{'peak MB':>10s}")
    for it in rows:
        low, high = it["quartiles_ms"]
        print(f"{it['head']:20s}{it['median_ms']:9.1f}{f'[{low:.1f}, {high:.1f}]':>22s}{it['tokens_per_s']:12,.0f}{it['x_plain']:10.2f}{it['peak_mb']:10,.0f}")
    if asked.json:
        Path(asked.json).write_text(json.dumps({"settings": vars(asked), "torch": torch.__version__, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def parser() -> Parser:
    it = Parser(prog="python -m benchmarks.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    it.add_argument("config", metavar="CONFIG.toml", help="whose [model], [optimizer] and [train] are used")
    it.add_argument("--heads", default="linear,euclidean,cosine", help="names of heads, with their default options (default linear,euclidean,cosine)")
    it.add_argument("--tokens", type=int, default=4096, help="tokens per update, rounded down to whole blocks (default 4096)")
    it.add_argument("--vocab-size", type=int, default=50257, help="words (default 50257)")
    it.add_argument("--updates", type=int, default=5, help="updates measured of each (default 5)")
    it.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    it.add_argument("--json", help="also write everything to this file")
    it.add_argument("--memory-of", help=argparse.SUPPRESS)
    return it


def contestant(name: str, asked: argparse.Namespace):
    """A function that makes one update of the config's backbone with the head `name`."""
    config = resolved(asked)
    device = torch.device(asked.device)
    seed_torch(config.seed, "initialisation")
    precision = Precision(config.train.precision, device)
    if name == PLAIN:
        model = nn.Module()
        model.backbone = build_model(config.model)
        model.head = PlainHead(model.backbone.token_embedding.weight)
    else:
        model = runs.build(replace(config, head=replace(config.head, name=name)), meta(asked))
    model.to(device)
    optimizer = build_optimizer(model, config.optimizer, device)
    block = min(config.model.block_size, asked.tokens)
    tokens = torch.randint(asked.vocab_size, (asked.tokens // block, block + 1)).to(device)

    def update() -> None:
        with precision.autocast():
            loss = model.head(model.backbone(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norm = gradient_norms(model)[0]
        nn.utils.clip_grads_with_norm_(model.parameters(), config.train.grad_clip, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        norm.item()  # waits for the device

    return update


def meta(asked: argparse.Namespace) -> DatasetMeta:
    return DatasetMeta("uint16", asked.vocab_size, asked.vocab_size - 1, 0, 0, mask_token_id=asked.vocab_size)


def resolved(asked: argparse.Namespace) -> Config:
    return runs.resolve(load_config(asked.config), meta(asked))


def row(name: str, milliseconds: dict[str, list[float]], asked: argparse.Namespace) -> dict:
    words = [f"--{key}={getattr(asked, key.replace('-', '_'))}" for key in ("tokens", "vocab-size", "device")]
    child = subprocess.run([sys.executable, "-m", "benchmarks.train", asked.config, *words, "--memory-of", name], capture_output=True, text=True)
    if child.returncode:
        raise RunFailed(f"measuring the memory of {name}: {child.stderr.strip()[-300:]}")
    low, median, high = statistics.quantiles(milliseconds[name], n=4) if asked.updates > 1 else milliseconds[name] * 3
    ratio = statistics.median(mine / plain for mine, plain in zip(milliseconds[name], milliseconds[PLAIN], strict=True))
    return {
        "head": name, "median_ms": median, "quartiles_ms": [low, high], "n": asked.updates, "tokens_per_s": 1e3 * asked.tokens / median,
        "x_plain": ratio, "peak_mb": float(child.stdout.split()[-1]),
    }  # fmt: skip


if __name__ == "__main__":
    command(main)
