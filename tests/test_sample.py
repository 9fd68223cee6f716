"""Sampling as users type it: a causal run and a masked-LM run, trained for a few steps on real text."""

import pytest
import torch

import sample
import train
from commands import InputError
from data.tokenizers import load_tokenizer
from model.generation import Sampling, generate
from runs import open_run


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Run folders of a causal and a masked-LM model."""
    folder = tmp_path_factory.mktemp("runs")
    shape = "n_layer = 1\nn_head = 2\nn_embd = 32\nblock_size = 32"
    for name, head in (("gpt2", "cosine"), ("bert", "linear")):
        config = folder / f"{name}.toml"
        config.write_text(
            f'[data]\ndataset = "{corpus}"\n[model]\nname = "{name}"\n{shape}\n[head]\nname = "{head}"\n[optimizer]\nlearning_rate = 1e-2\n'
            '[train]\nmax_steps = 30\nbatch_size = 8\ndevice = "cpu"\n[eval]\ntokens = 512\n[emissions]\nenabled = false\n',
            encoding="utf-8",
        )
        train.main([str(config), f"--out_dir={folder / name}"])
    return folder


def texts(capsys, *argv):
    capsys.readouterr()
    sample.main([str(word) for word in argv])
    return capsys.readouterr().out.split("\n" + sample.RULE + "\n")[:-1]


def test_a_continuation_begins_with_its_prompt_and_is_the_models(runs, capsys):
    printed = texts(capsys, runs / "gpt2", "--prompt", "The for statement", "--num-samples", 3, "--max-new-tokens", 50, "--seed", 5)
    run, tokenizer = open_run(runs / "gpt2"), load_tokenizer("bytes")
    prompt = tokenizer.encode("The for statement")
    expected = generate(run.model, torch.tensor(prompt), Sampling(50, 3, 0.8, seed=5))  # 17 + 50 bytes: beyond the block of 32
    assert printed == [tokenizer.decode(prompt + row) for row in expected.tolist()]
    assert len(set(printed)) == 3


def test_options_reach_the_sampler(runs, capsys):
    greedy = [texts(capsys, runs / "gpt2", "--prompt", "a", "--temperature", 0, "--seed", seed) for seed in (1, 2)]
    single = [texts(capsys, runs / "gpt2", "--prompt", "a", option, value)[0] for option, value in (("--top-k", 1), ("--top-p", 1e-6))]
    assert greedy[0] == greedy[1] == single[:1] == single[1:]
    hot = [texts(capsys, runs / "gpt2", "--prompt", "a", "--temperature", 2, "--seed", seed) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


def test_without_a_prompt_a_new_text_begins(runs, capsys):
    (text,) = texts(capsys, runs / "gpt2", "--max-new-tokens", 20)
    assert len(text) > 0 and not text.startswith("<|endoftext|>")


def test_masks_are_filled_in(runs, capsys):
    (text,) = texts(capsys, runs / "bert", "--prompt", "The f[MASK]r stat[MASK]ment")
    assert len(text) == len("The for statement") and text[:5] == "The f" and text[6:12] == "r stat" and text[13:] == "ment"
    assert len(texts(capsys, runs / "bert", "--prompt", "[MASK][MASK][MASK]", "--num-samples", 4)) == 4


def test_what_cannot_be_sampled_is_one_line(runs):
    for argv, message in (
        (["gpt2", "--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["gpt2", "--top-k", "many"], "--top-k: invalid int value"),
        (["bert", "--prompt", "no mask here"], "fills in \\[MASK\\]"),
        (["bert", "--prompt", "[MASK]" * 33], "33 tokens is longer than block_size=32"),
        (["none"], "none is not a run folder"),
        (["gpt2", "--checkpoint", "7"], "no checkpoint of step 7"),
    ):
        with pytest.raises(InputError, match=message):
            sample.main([str(runs / argv[0]), *argv[1:]])


def test_the_command_in_a_process_of_its_own(runs, execute):
    done = execute("sample.py", runs / "gpt2", "--prompt", "The for statement", "--max-new-tokens", 10, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.startswith("The for statement"), done.stderr
    failed = execute("sample.py", runs / "gpt2", "--num-samples", 0)
    assert failed.returncode == 2 and failed.stderr == "error: num_samples=0 is out of range\n"
