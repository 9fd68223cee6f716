"""What README shows is run: its code, its config, the commands it names."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from config import load_config
from heads import HEADS, build_head

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language, containing):
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in text]
    return found


@pytest.fixture
def hellinger(tmp_path, monkeypatch):
    """README's distance, written to a file and entered in the registry under its name."""
    path = tmp_path / "hellinger.py"
    path.write_text(block("python", "class Hellinger"), encoding="utf-8")
    monkeypatch.setitem(HEADS, "hellinger", runpy.run_path(str(path))["Hellinger"])


@pytest.mark.parametrize("link", [{"exponent": 6.0}, {"link": "gibbs", "tau": 0.1}, {"exponent": "auto", "learn_exponent": True}])
def test_the_distance_of_the_readme_is_a_whole_head(hellinger, link):
    torch.manual_seed(0)
    head = build_head("hellinger", n_embd=5, vocab_size=11, padded_vocab_size=13, **link).double()
    hidden, targets = torch.randn(7, 5, dtype=torch.float64, requires_grad=True), torch.randint(11, (7,))
    loss = head(hidden, targets)
    grads = torch.autograd.grad(loss, (hidden, head.weight))

    d = head.definition(hidden, head.weight[:11])
    logits = -d / 0.1 if "tau" in link else -head.exponent_value * d.log()
    expected = torch.nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for ours, reference in zip(grads, torch.autograd.grad(expected, (hidden, head.weight)), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-9)
    assert torch.all(head.log_probs(hidden)[:, 11:] == -torch.inf)
    torch.testing.assert_close(head.distances(hidden)[:, :11], d.detach())


def test_the_distance_of_the_readme_trains(hellinger, config_file, tmp_path):
    import json

    import train

    train.main([str(config_file), f"--out_dir={tmp_path / 'run'}", "--head.name=hellinger", "--model.tie_weights=false", "--train.max_steps=30"])
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = [line["val_nll"] for line in lines if line["kind"] == "eval"]
    assert last < first - 0.5


def test_the_python_lines_of_the_readme_run(tmp_path):
    path = tmp_path / "lines.py"
    path.write_text(block("python", "head.log_probs(hidden)"), encoding="utf-8")
    names = runpy.run_path(str(path), init_globals={"hidden": torch.randn(2, 3, 768), "targets": torch.randint(50257, (2, 3))})
    assert names["loss"].ndim == 0 and names["log_probs"].shape == names["d"].shape == (2, 3, 50304)


def test_the_config_of_the_readme_loads(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(block("toml", "[data]"), encoding="utf-8")
    assert load_config(path).model.n_embd == 384


COMMANDS = sorted({line.split("#")[0].strip() for line in README.splitlines() if re.match(r"    (python|torchrun) ", line)})


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_readme_names_what_exists(line):
    words = shlex.split(line)
    if words[0] == "torchrun":
        words = ["python", *words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]]
    target = ROOT / (words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1])
    assert target.is_file(), f"{line}: there is no {target}"
    text = target.read_text(encoding="utf-8")
    for word in words[2:]:
        if word.endswith(".toml"):
            load_config(ROOT / word, [flag for flag in words if re.match(r"--\w+\.\w+=", flag)] if target.name == "train.py" else [])
        elif re.match(r"--[a-z][\w-]*$", word) and target.name != "train.py":
            assert f'"{word}"' in text, f"{line}: {target.name} has no {word}"


def test_nothing_in_the_readme_is_left_open():
    assert "@@" not in README
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), f"README links to {target}, which is not there"
