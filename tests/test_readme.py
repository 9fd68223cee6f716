"""What README shows is run: its code, its config, the commands it names."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from config import load_config
from heads import HEADS
from tests.heads import test_every_head as every
from tests.heads.harness import LINKS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language, containing):
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in text]
    return found


@pytest.fixture
def its_distance(tmp_path, monkeypatch):
    """README's distance, written to a file and entered in the registry under its name."""
    path = tmp_path / "weighted_manhattan.py"
    path.write_text(block("python", "class WeightedManhattan"), encoding="utf-8")
    monkeypatch.setitem(HEADS, "weighted_manhattan", runpy.run_path(str(path))["WeightedManhattan"])
    return "weighted_manhattan"


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_the_distance_of_the_readme_is_a_whole_head(its_distance, link):
    every.test_log_probs_and_gradients_match_the_definition(its_distance, link)
    every.test_gradcheck_in_float64(its_distance, link)
    every.test_coincidences_and_extreme_scales_stay_finite(its_distance, link)
    every.test_hidden_states_that_are_not_finite_give_a_loss_that_is_not(its_distance, link, torch.inf)


def test_the_distance_of_the_readme_has_the_properties_of_all(its_distance):
    every.test_joint_rescaling_leaves_probabilities_unchanged(its_distance, {})
    every.test_near_pairs_are_neither_floored_nor_rounded_away(its_distance, {}, 1e-4)
    every.test_the_gradient_with_respect_to_ln_d_is_the_responsibilities(its_distance, {})
    every.test_thirty_steps_lower_the_loss(its_distance)


def test_the_distance_of_the_readme_trains(its_distance, config_file, tmp_path):
    import json

    import train

    words = [f"--head.name={its_distance}", "--model.tie_weights=false", "--train.max_steps=30"]
    train.main([str(config_file), f"--out_dir={tmp_path / 'run'}", *words])
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
