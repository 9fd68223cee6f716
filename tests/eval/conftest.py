"""Run folders as train.py leaves them, made up: known curves, no training."""

import json

import numpy as np
import pytest

CONFIG = """seed = {seed}
out_dir = "{directory}"

[data]
dataset = "data/text"
mask_fraction = 0.15

[model]
name = "{family}"
n_layer = 2
n_head = 2
n_embd = 16
block_size = 32
tie_weights = {tied}
vocab_size = 320

[head]
name = "{head}"
{options}
[optimizer]
learning_rate = {learning_rate}
weight_decay = 0.01

[schedule]
decay_steps = {max_steps}
warmup_steps = {warmup}
min_lr = {min_lr}

[train]
max_steps = {max_steps}
batch_size = {batch_size}
gradient_accumulation_steps = 1
grad_clip = 1.0
precision = "float32"
label_smoothing = 0.0

[eval]
interval = 50
tokens = 4096

[emissions]
enabled = true
"""


@pytest.fixture
def make_run(tmp_path):
    """make_run(head, seed, ...) writes a run folder with synthetic curves and returns its path; `level` shifts its losses."""

    def make(head="linear", seed=1, **changes):
        facts = {"family": "gpt2", "options": {}, "tied": True, "learning_rate": 1e-3, "max_steps": 200, "batch_size": 8, "level": 0.0}
        facts |= {"name": None, "checksum": "abc", "steps": None, "emissions": True, "hidden": False, "energy": 1.0, "noise": 0.1} | changes
        directory = tmp_path / (facts["name"] or f"{facts['family']}-{head}-s{seed}")
        directory.mkdir()
        options = "".join(f"{key} = {json.dumps(value)}\n" for key, value in facts["options"].items())
        text = CONFIG.format(
            seed=seed, directory=directory, family=facts["family"], head=head, options=options, tied=str(facts["tied"]).lower(),
            learning_rate=facts["learning_rate"], max_steps=facts["max_steps"], warmup=facts["max_steps"] // 20,
            min_lr=facts["learning_rate"] / 100, batch_size=facts["batch_size"],
        )  # fmt: skip
        (directory / "config.toml").write_text(text, encoding="utf-8")
        about = {
            "dataset": {"checksum": facts["checksum"], "tokenizer": "bytes", "vocab_size": 257},
            "world_size": 1,
            "exit_reason": "finished",
        }
        about |= {"seed": seed, "hardware": {"cpu": "a cpu", "gpus": []}}
        (directory / "run.json").write_text(json.dumps(about), encoding="utf-8")
        lines = curves(seed, facts)
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        if facts["hidden"]:
            rng = np.random.default_rng(seed)
            values = np.geomspace(1, 1e-3 * (1 + facts["level"]) ** 2, 16)
            projection = rng.normal(size=(300, 2))
            np.savez(directory / "eval_hidden.npz", eigenvalues=values, eigenvalues_every_position=values, projection=projection)
        return directory

    return make


def curves(seed, facts):
    """Losses fall exponentially from 5.5; gradient norms and energies are noisy around known means."""
    rng = np.random.default_rng(seed)
    lines = [evaluation(0, 5.5)]
    for step in range(1, (facts["steps"] or facts["max_steps"]) + 1):
        loss = 2 + facts["level"] + 3.5 * np.exp(-step / 40) + 0.01 * rng.normal()
        norm = 1 + facts["noise"] * rng.normal()
        lines.append(
            {"kind": "train", "step": step, "loss": loss, "lr": facts["learning_rate"], "grad_norm": norm, "grad_norm_head": norm / 2,
             "grad_norm_backbone": norm / 2, "tokens": 256 * step, "step_ms": 10.0, "tokens_per_s": 25600.0, "memory_mb": 300.0}
        )  # fmt: skip
        if step % 50 == 0:
            lines.append(evaluation(step, loss + 0.1))
        if step % 100 == 0 and facts["emissions"]:
            spent = {
                "first_step": step - 99,
                "last_step": step,
                "kwh": 1e-4 * facts["energy"],
                "gco2eq": 0.05 * facts["energy"],
                "seconds": 1.0,
            }
            lines += [
                {"kind": "emissions", "scope": "training", **spent},
                {"kind": "emissions", "scope": "evaluation", **spent, "kwh": 1e-5, "gco2eq": 0.005},
            ]
    return lines


def evaluation(step, nll):
    prototypes = {"norm_quantiles": {"50": 1 + step / 1000}, "nearest_distance_mean": 0.5, "moved_less_share": None if step == 0 else 0.25}
    return {
        "kind": "eval", "step": step, "train_nll": nll - 0.1, "val_nll": nll, "val_perplexity": float(np.exp(nll)), "val_accuracy": 0.1,
        "effective_rank": 3 + step / 100, "pca5": 0.5, "pca90": 7, "pc2_ev": 0.3, "n_positions": 4096, "n_tokens": 4096, "n_pca": 128,
        "pca_few": True, "prototypes": prototypes,
    }  # fmt: skip
