"""Loading: file and flags are equally strict, errors are one line, and a config written is a config read."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from commands import InputError
from config import Config, load_config, parse_command_line, to_toml
from config.load import help_text
from config.schema import KEYS, DataConfig, HeadConfig, ModelConfig, OptimizerConfig

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "config").glob("*.toml"))
DATA = '[data]\ndataset = "data/x"\n'


def write(folder, text, name="x.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, DATA + "[train]\nbatch_size = 4\n[head]\nexponent = 28\n")


def refusal(path, *flags):
    with pytest.raises(InputError) as caught:
        load_config(path, flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_shipped_file_loads(path):
    config = load_config(path)
    assert config.out_dir == f"out/{path.stem}"


def test_shipped_files_exist():
    names = {path.name for path in FILES}
    assert {"quickstart.toml", "quickstart_linear.toml", "gpt2_small.toml", "gpt2_small_cosine.toml", "gpt2_small_euclidean.toml"} <= names


def test_the_two_quickstarts_differ_in_the_head_alone():
    a, b = (load_config(ROOT / "config" / name) for name in ("quickstart.toml", "quickstart_linear.toml"))
    assert replace(a, out_dir="", head=b.head) == replace(b, out_dir="")


def test_flags_override_the_file_and_the_last_flag_wins(path):
    config = load_config(path, ["--train.batch_size=8", "--train.batch_size", "16", "--seed=7", "--out_dir", "out/elsewhere"])
    assert (config.train.batch_size, config.seed, config.out_dir, config.data.dataset) == (16, 7, "out/elsewhere", "data/x")
    assert load_config(path).train.batch_size == 4


def test_whole_numbers_pass_as_floats_in_file_and_flag(path):
    for config in (load_config(path), load_config(path, ["--head.exponent=28"])):
        assert config.head.exponent == 28.0 and isinstance(config.head.exponent, float)


@pytest.mark.parametrize("text", ["1e-3", "3.0", "abc", "true", "", "[1]", "none"])
def test_what_is_not_a_whole_number_is_refused_for_one(path, tmp_path, text):
    message = refusal(path, f"--train.batch_size={text}")
    assert message == f"--train.batch_size={text}: must be a whole number"
    for literal in {"1e-3": "1e-3", "3.0": "3.0", "true": "true", "[1]": "[1]"}.get(text, f'"{text}"'), '"8"':
        message = refusal(write(tmp_path, DATA + f"[train]\nbatch_size = {literal}\n", "y.toml"))
        assert "y.toml: train.batch_size = " in message and message.endswith("must be a whole number")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("True", True), ("false", False), ("False", False)])
def test_booleans(path, text, value):
    assert load_config(path, [f"--train.compile={text}"]).train.compile is value
    assert "true or false" in refusal(path, "--train.compile=1")
    assert "--train.compile=VALUE" in refusal(path, "--train.compile")


def test_none_unsets_an_optional_key_and_no_other(tmp_path):
    path = write(tmp_path, DATA + 'mask_token_id = 5\n[model]\ninit_from = "out/x"\n[head]\nlink = "gibbs"\n')
    config = load_config(path, ["--data.mask_token_id=none", "--model.init_from=null", "--head.link=None"])
    assert (config.data.mask_token_id, config.model.init_from, config.head.link) == (None, None, None)
    assert load_config(path, ["--head.name=none"]).head.name == "none"
    assert refusal(path, "--optimizer.beta1=none") == "--optimizer.beta1=none: must be a number"


def test_strings_hold_anything(path):
    for text in ("a=b", "x y", "123", "~/ü", "--", "[1]", "true"):
        assert load_config(path, [f"--data.dataset={text}"]).data.dataset == text


@pytest.mark.parametrize("rule", ["auto", "dim", "sqrt_dim"])
def test_exponent_is_a_number_or_a_rule(path, tmp_path, rule):
    assert load_config(path, [f"--head.exponent={rule}"]).head.exponent == rule
    assert load_config(write(tmp_path, DATA + f'[head]\nexponent = "{rule}"\n')).head.exponent == rule
    assert refusal(path, "--head.exponent=sqrt") == "--head.exponent=sqrt: must be a number or 'auto' or 'dim' or 'sqrt_dim'"
    assert "must be a number or 'auto'" in refusal(path, "--head.hidden_scale=dim")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.max_step", "train.max_steps"),
        ("trian.max_steps", "train.max_steps"),
        ("train.batch-size", "train.batch_size"),
        ("max_steps", "train.max_steps"),
        ("learning_rte", "optimizer.learning_rate"),
        ("sed", "seed"),
        ("batch_size", "train.batch_size or {}eval.batch_size"),
    ],
)
def test_unknown_keys_get_the_nearest_one_in_flag_and_file(path, tmp_path, typed, meant):
    assert refusal(path, f"--{typed}=3") == f"--{typed}: unknown key; did you mean --{meant.format('--')}?"
    section, _, key = typed.rpartition(".")
    text = f"[{section}]\n{key} = 3\n" if section else f"{key} = 3\n"
    other = write(tmp_path, text + ("" if section else DATA), "y.toml")
    assert refusal(other) == f"{other}: {typed}: unknown key; did you mean {meant.format('')}?"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[zzz]\n", ["zzz: unknown key", "--help"]),
        ("model = 3\n", ["model is a section", "model.n_layer"]),
        ("[train.max_steps]\nx = 1\n", ["train.max_steps.x: unknown key", "train.max_steps?"]),
        ("[train]\nmax_steps = {}\n", ["train.max_steps = {} must be a whole number"]),
        ("[data]\ndataset = 3\n", ["data.dataset = 3 must be a string"]),
        ("[data]\ndataset = 2020-01-01\n", ["data.dataset", "must be a string"]),
        ('[train]\ncompile = "true"\n', ["train.compile = 'true' must be true or false"]),
        ('[train]\nprecision = "fp16"\n', ["train.precision = 'fp16' must be 'float32' or 'bfloat16' or 'float16'"]),
        ("[train]\nmax_steps = 3\n", ["data.dataset is missing", "data.prepare"]),
        ("seed = 1\nlearning = = 3\n", ["not valid TOML", "line 2"]),
        ("seed = 1\nseed = 2\n", ["not valid TOML", "line 2"]),
    ],
)
def test_files_with_a_mistake(tmp_path, text, parts):
    path = write(tmp_path, text)
    message = refusal(path)
    assert str(path) in message and all(part in message for part in parts), message


def test_files_that_cannot_be_read(tmp_path):
    assert refusal(tmp_path / "no.toml") == f"{tmp_path / 'no.toml'}: no such config file"
    assert str(tmp_path) in refusal(tmp_path)
    (tmp_path / "latin.toml").write_bytes('# é\n[data]\ndataset = "x"\n'.encode("latin-1"))
    assert "latin.toml" in refusal(tmp_path / "latin.toml")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    assert load_config(write(tmp_path, "\ufeff" + DATA)).data.dataset == "data/x"


def test_utf8_whatever_the_locale(tmp_path):
    write(tmp_path, '# größer\n[data]\ndataset = "data/ü"\n', "ünï.toml")
    code = (
        "import sys, config; c = config.load_config(sys.argv[1]); print(ascii(c.data.dataset)); "
        "open('resolved.toml', 'w', encoding='utf-8').write(config.to_toml(c))"
    )
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, "ünï.toml"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == r"'data/\xfc'", done.stderr
    assert load_config(tmp_path / "resolved.toml").out_dir == "out/ünï"


def test_toml_round_trips_exactly(tmp_path, path):
    odd = 'a "quoted" \\ back\nslash\ttab \x7f \x00 ü 漢 \U0001f600'
    configs = [
        load_config(path),
        Config(
            DataConfig(odd, mask_token_id=0),
            seed=2**63 - 1,
            out_dir="",
            model=ModelConfig("qwen2", rms_norm_eps=1e-300, rope_theta=1e22, bias=False, init_from="none"),
            head=HeadConfig(exponent="auto", p=float("inf"), normalized=False, tau=5e-324),
            optimizer=OptimizerConfig(beta1=1 / 3),
        ),
    ]
    for number, config in enumerate(configs):
        text = to_toml(replace(config, out_dir="out/x"))
        assert load_config(write(tmp_path, text, f"{number}.toml")) == replace(config, out_dir="out/x")
        assert "None" not in text


def test_the_written_config_is_complete(path):
    text = to_toml(load_config(path))
    for name, entry in KEYS.items():
        assert (f"\n{name.rpartition('.')[2]} = " in "\n" + text) or entry.default is None, name


def test_help_lists_every_key_with_meaning_and_default(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_command_line(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and text == help_text()
    flat = " ".join(text.split())
    for name, entry in KEYS.items():
        assert f"--{name} " in flat and entry.metadata["help"] in flat, name
    assert "(default 0.0006)" in flat and "(default true)" in flat and "%%" not in flat
    assert all(len(line) <= 140 for line in text.splitlines())


def test_command_line(path):
    line = parse_command_line(["--resume", str(path), "--train.max_steps", "5", "--print-config"])
    assert (line.resume, line.overwrite, line.print_config, line.config_path) == (True, False, True, path)
    assert line.config == load_config(path, ["--train.max_steps=5"])
    for argv, part in [([], "which config file"), ([str(path)] * 2, "not 2"), ([str(path), "--resume", "--overwrite"], "one of the two")]:
        with pytest.raises(InputError, match=part):
            parse_command_line(argv)


def test_load_config_takes_flags_only(path):
    assert "not a flag" in refusal(path, "train.batch_size=3")
