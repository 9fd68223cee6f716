import json
import math
import shutil

import numpy as np
import pytest

import train
from commands import InputError
from data.token_file import open_dataset
from eval.evaluate import main

CONFIG = """
[data]
dataset = "{dataset}"
[model]
n_layer = 1
n_head = 2
n_embd = 16
block_size = 32
[head]
name = "linear"
[train]
max_steps = 6
batch_size = 8
device = "cpu"
[eval]
tokens = 600
[emissions]
enabled = false
"""


@pytest.fixture(scope="module")
def causal(corpus, tmp_path_factory):
    return train_run(corpus, tmp_path_factory.mktemp("causal"), "--head.name=cosine", "--train.checkpoint_interval=4")


@pytest.fixture(scope="module")
def masked(corpus, tmp_path_factory):
    return train_run(corpus, tmp_path_factory.mktemp("masked"), "--model.name=bert")


def train_run(corpus, folder, *flags):
    config = folder / "run.toml"
    config.write_text(CONFIG.format(dataset=corpus), encoding="utf-8")
    train.main([str(config), f"--out_dir={folder / 'run'}", *flags])
    return folder / "run"


def evaluate(capsys, *arguments):
    main(list(map(str, arguments)))
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


def test_stdout_ends_with_the_json_that_the_folder_holds(causal, corpus, capsys):
    results, out = evaluate(capsys, causal)
    assert json.loads((causal / "eval.json").read_text()) == results
    lines = [json.loads(line) for line in (causal / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    assert set(last) - {"kind"} <= set(results)
    assert {"bits_per_byte", "pca90", "pc2_ev", "n_positions", "n_tokens", "objective"} <= set(results)
    assert results["n_positions"] == open_dataset(corpus).meta.val_tokens - 1 and results["step"] == 6
    assert results["objective"] == "causal" and "perplexity" in out and "pseudo" not in out
    assert results["val_perplexity"] == pytest.approx(math.exp(results["val_nll"]))


def test_the_final_evaluation_of_training_is_reproduced(causal, capsys):
    results, _ = evaluate(capsys, causal, "--tokens", 600)
    lines = [json.loads(line) for line in (causal / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    for key in ("train_nll", "val_nll", "val_perplexity", "val_accuracy", "effective_rank", "pca5", "n_positions", "n_pca"):
        assert results[key] == pytest.approx(last[key], rel=1e-6), key


def test_the_batch_size_changes_nothing(causal, capsys):
    one, three = (evaluate(capsys, causal, "--tokens", 1000, "--batch-size", size)[0] for size in (1, 3))
    for key, value in one.items():
        assert three[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


def test_bits_per_byte_of_bytes(causal, corpus, capsys):
    results, _ = evaluate(capsys, causal)
    val = open_dataset(corpus).val
    n_bytes = int((val[1 : len(val)] != 256).sum())
    assert results["bits_per_byte"] == pytest.approx(results["val_nll"] / math.log(2) * (len(val) - 1) / n_bytes, rel=1e-12)


def test_masked_perplexity_is_called_pseudo(masked, capsys):
    results, out = evaluate(capsys, masked)
    assert results["objective"] == "masked" and "pseudo-perplexity" in out
    assert results["n_positions"] < results["n_tokens"] / 5


def test_checkpoints_by_name_and_step(causal, capsys):
    assert evaluate(capsys, causal, "--checkpoint", "4", "--tokens", 64)[0]["step"] == 4
    assert evaluate(capsys, causal, "--checkpoint", "best", "--tokens", 64)[0]["step"] in (4, 6)
    for which in ("5", "newest"):
        with pytest.raises(InputError):
            main([str(causal), "--checkpoint", which])


def test_neighbours_are_listed_in_the_heads_metric(causal, capsys):
    results, out = evaluate(capsys, causal, "--tokens", 64, "--neighbours", "a")
    (nearest,) = results["neighbours"].values()
    assert len(nearest) == 10 and "nearest words" in out
    distances = [distance for _, distance in nearest]
    assert distances == sorted(distances) and all(0 <= distance <= 2 for distance in distances)
    assert "a" not in [word for word, _ in nearest]


def test_another_vocabulary_is_refused(causal, corpus, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"tokenizer": "gpt2", "vocab_size": 50257}))
    before = (causal / "eval.json").read_bytes() if (causal / "eval.json").exists() else None
    with pytest.raises(InputError, match="vocabulary of gpt2 .50257 ids. and the run that of bytes .257 ids.*--tokenizer bytes"):
        main([str(causal), "--dataset", str(other)])
    assert before == ((causal / "eval.json").read_bytes() if (causal / "eval.json").exists() else None)


def test_other_text_of_the_same_vocabulary_is_evaluated(causal, corpus, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    val = (other / "val.bin").read_bytes()
    meta = json.loads((other / "meta.json").read_text())
    (other / "val.bin").write_bytes(val[: len(val) // 4 * 2])
    (other / "meta.json").write_text(json.dumps(meta | {"val_tokens": len(val) // 4, "checksum": "sha256:other"}))
    results, out = evaluate(capsys, causal, "--dataset", other)
    assert results["n_tokens"] == len(val) // 4 - 1 and "checksums differ" in out


@pytest.mark.parametrize(
    "arguments", [["nowhere"], ["{run}", "--tokens", "0"], ["{run}", "--batch-size", "x"], ["{run}", "--tokenz", "1"], []]
)
def test_bad_input_is_one_line(causal, arguments):
    with pytest.raises(InputError) as error:
        main([argument.format(run=causal) for argument in arguments])
    assert "\n" not in str(error.value)


def test_the_stored_projection_has_the_variance_of_its_components(causal, capsys):
    evaluate(capsys, causal)  # fewer windows than are kept
    with np.load(causal / "eval_hidden.npz", allow_pickle=False) as stored:
        assert len(stored["projection"]) > 100
        np.testing.assert_allclose(stored["projection"].var(axis=0), stored["eigenvalues"][:2], rtol=1e-5)
        assert len(stored["eigenvalues_every_position"]) == 16


def test_as_a_command(causal, execute):
    done = execute("-m", "eval.evaluate", causal, "--tokens", "64")
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["step"] == 6
