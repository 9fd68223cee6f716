"""The main job, end to end: in this process where that shows the same, in real processes where signals, ranks or exit statuses count."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import time
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch.amp import GradScaler

import runs
import train
from commands import InputError, RunFailed
from heads import HEADS
from training.precision import Precision


def run(config_file, out_dir, *flags):
    """Trains in this process; returns the lines of metrics.jsonl."""
    train.main([str(config_file), f"--out_dir={out_dir}", *flags])
    return lines(out_dir)


def lines(out_dir, kind=None):
    every = [json.loads(text) for text in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if kind in (None, line["kind"])]


def losses(out_dir):
    return [line["loss"] for line in lines(out_dir, "train")]


def weights(out_dir, step):
    return load_file(out_dir / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def torchrun(processes, *words):
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "train.py", *map(str, words))


# ------------------------------------------------------------------------------------------------ the run folder


def test_a_run_leaves_a_whole_record(config_file, tmp_path, capsys):
    out = tmp_path / "run"
    run(config_file, out, "--eval.interval=4", "--train.checkpoint_interval=3", "--train.keep_last=9", "--log.interval=2")
    steps = lines(out, "train")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in steps] == [8 * 32 * step for step in range(1, 7)]
    wanted = {"loss", "lr", "grad_norm", "grad_norm_head", "grad_norm_backbone", "step_ms", "tokens_per_s", "memory_mb"}
    assert all(wanted <= line.keys() for line in steps)
    evaluations = lines(out, "eval")
    assert [line["step"] for line in evaluations] == [0, 4, 6]
    assert evaluations[0]["val_nll"] == pytest.approx(math.log(257), abs=0.7)
    assert {"train_nll", "val_nll", "val_perplexity", "val_accuracy", "effective_rank", "pca5"} <= evaluations[0].keys()
    assert {path.name for path in (out / "checkpoints").glob("step_*")} >= {"step_00000003", "step_00000006"}
    about = json.loads((out / "run.json").read_text())
    assert about["exit_reason"] == "finished" and about["seed"] == 7 and about["world_size"] == 1
    assert about["dataset"]["checksum"] and about["versions"]["torch"] == torch.__version__
    shown = capsys.readouterr().out
    assert "step      2 | loss" in shown and "step      3 | loss" not in shown
    best = (out / "checkpoints" / "best").read_text().strip()
    assert best == f"step_{min(evaluations[1:], key=lambda line: line['val_nll'])['step']:08d}"


def test_the_resolved_config_alone_reproduces_the_run(config_file, tmp_path):
    run(config_file, tmp_path / "a", "--head.name=cosine", "--head.exponent=auto", "--train.max_steps=4")
    run(tmp_path / "a" / "config.toml", tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert_same_weights(weights(tmp_path / "a", 4), weights(tmp_path / "b", 4))


@pytest.mark.parametrize("head", ["linear", "euclidean", "cosine"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_training_lowers_the_loss(config_file, tmp_path, head, tied):
    run(config_file, tmp_path / "run", f"--head.name={head}", f"--model.tie_weights={tied}", "--train.max_steps=30")
    first, last = lines(tmp_path / "run", "eval")
    assert first["val_nll"] == pytest.approx(math.log(257), abs=0.7)
    assert last["val_nll"] < first["val_nll"] - 1


def test_a_run_may_start_from_another_with_another_head(config_file, tmp_path):
    run(config_file, tmp_path / "first", "--train.max_steps=30")
    start = f"--model.init_from={tmp_path / 'first'}"
    run(config_file, tmp_path / "same", start, "--train.max_steps=1")
    run(config_file, tmp_path / "other", start, "--head.name=cosine", "--train.max_steps=2")
    ended = lines(tmp_path / "first", "eval")[-1]["val_nll"]
    assert lines(tmp_path / "same", "eval")[0]["val_nll"] == pytest.approx(ended, rel=1e-6)
    assert lines(tmp_path / "other", "eval")[0]["val_nll"] > ended + 0.1, "the backbone was trained for another head"
    backbone = weights(tmp_path / "first", 30)["backbone.h.1.mlp.c_fc.weight"]
    moved = weights(tmp_path / "other", 2)["backbone.h.1.mlp.c_fc.weight"]
    assert 0 < (moved - backbone).abs().max() < 0.01
    run(config_file, tmp_path / "other", start, "--head.name=cosine", "--train.max_steps=3", "--resume")


@pytest.mark.parametrize("head", HEADS)
def test_every_head_trains_opens_resumes_and_repeats(config_file, tmp_path, head):
    out = tmp_path / "run"
    run(config_file, out, f"--head.name={head}", "--train.max_steps=1", "--schedule.decay_steps=3")
    assert runs.open_run(out).config.head.name == head
    run(config_file, out, f"--head.name={head}", "--train.max_steps=2", "--resume")
    run(out / "config.toml", tmp_path / "again")
    assert losses(tmp_path / "again") == losses(out)


# ---------------------------------------------------------------------------- what must not change the sequence of updates


def test_evaluating_more_often_changes_no_training_loss(config_file, tmp_path):
    run(config_file, tmp_path / "rare", "--model.dropout=0.1", "--eval.interval=100")
    run(config_file, tmp_path / "often", "--model.dropout=0.1", "--eval.interval=2", "--eval.batch_size=3")
    assert losses(tmp_path / "rare") == losses(tmp_path / "often")
    rare, often = lines(tmp_path / "rare", "eval"), lines(tmp_path / "often", "eval")
    assert rare[-1]["val_nll"] == pytest.approx(often[-1]["val_nll"], rel=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_micro_steps_change_nothing(config_file, tmp_path, family):
    flags = (f"--model.name={family}", "--head.name=cosine", "--head.exponent=auto", "--train.max_steps=10")
    run(config_file, tmp_path / "whole", *flags)
    run(config_file, tmp_path / "split", *flags, "--train.batch_size=2", "--train.gradient_accumulation_steps=4")
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.parametrize("family, head", [("gpt2", "linear"), ("gpt2", "cosine"), ("bert", "euclidean")])
def test_two_processes_train_as_one(config_file, tmp_path, execute, family, head):
    flags = (f"--model.name={family}", f"--head.name={head}", "--train.max_steps=20", "--eval.interval=10")
    if head != "linear":
        flags += ("--head.exponent=auto",)
    run(config_file, tmp_path / "one", *flags)
    done = execute(*torchrun(2, config_file, f"--out_dir={tmp_path / 'two'}", *flags, "--train.batch_size=4"))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    for one, two in zip(lines(tmp_path / "one", "eval"), lines(tmp_path / "two", "eval"), strict=True):
        assert two["val_nll"] == pytest.approx(one["val_nll"], rel=1e-5)
        assert two["effective_rank"] == pytest.approx(one["effective_rank"], rel=1e-4)
        assert two["n_positions"] == one["n_positions"]


# -------------------------------------------------------------------------------------------------- stop and resume


@pytest.mark.parametrize("family, head", [("gpt2", "cosine"), ("bert", "linear"), ("qwen2", "euclidean")])
def test_a_stopped_and_resumed_run_is_bitwise_the_uninterrupted_one(config_file, tmp_path, family, head):
    flags = (f"--model.name={family}", f"--head.name={head}", "--model.dropout=0.1", "--eval.interval=3")
    run(config_file, tmp_path / "whole", *flags)
    run(config_file, tmp_path / "parts", *flags, "--train.max_steps=2", "--schedule.decay_steps=6")
    run(config_file, tmp_path / "parts", *flags, "--train.max_steps=5", "--resume")
    run(config_file, tmp_path / "parts", *flags, "--resume")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_same_weights(weights(tmp_path / "parts", 6), weights(tmp_path / "whole", 6))
    assert len(json.loads((tmp_path / "parts" / "run.json").read_text())["earlier_sessions"]) == 2


def wait_for_step(out_dir, step, process):
    for _ in range(1200):
        if (out_dir / "metrics.jsonl").exists() and len(losses_so_far(out_dir)) >= step:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError("the run does not get anywhere")


def losses_so_far(out_dir):
    text = (out_dir / "metrics.jsonl").read_text()
    return [line for line in text.splitlines() if line.startswith('{"kind": "train"') and line.endswith("}")]


def test_killed_at_any_moment_and_resumed_is_bitwise_the_uninterrupted_run(config_file, tmp_path, execute):
    flags = ("--model.dropout=0.1", "--head.name=cosine", "--train.max_steps=60", "--train.checkpoint_interval=1", "--eval.interval=25")
    run(config_file, tmp_path / "whole", *flags)
    out = tmp_path / "killed"
    resume = ()
    for step in (3, 20, 40):
        process = execute.start("train.py", config_file, f"--out_dir={out}", *flags, *resume)
        wait_for_step(out, step, process)
        process.kill()
        process.wait()
        resume = ("--resume",)
    run(config_file, out, *flags, "--resume")
    assert losses(out) == losses(tmp_path / "whole")
    assert_same_weights(weights(out, 60), weights(tmp_path / "whole", 60))


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_in_a_checkpoint_and_the_run_goes_on_from_there(config_file, tmp_path, execute, number, status):
    out = tmp_path / "run"
    process = execute.start("train.py", config_file, f"--out_dir={out}", "--train.max_steps=100000")
    wait_for_step(out, 3, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    stopped = lines(out, "train")[-1]["step"]
    assert weights(out, stopped)
    assert json.loads((out / "run.json").read_text())["exit_reason"] == signal.Signals(number).name
    run(config_file, out, f"--train.max_steps={stopped + 2}", "--schedule.decay_steps=100000", "--resume")
    assert lines(out, "train")[-1]["step"] == stopped + 2


def test_a_finished_run_says_so_and_stays_as_it_is(config_file, tmp_path, capsys):
    out = tmp_path / "run"
    run(config_file, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    run(config_file, out, "--resume")
    assert "is finished: 6 of 6 steps" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_a_folder_without_a_checkpoint_starts_at_step_0_and_says_so(config_file, tmp_path, capsys):
    out = tmp_path / "run"
    run(config_file, out, "--train.max_steps=3")
    shutil.rmtree(out / "checkpoints")
    run(config_file, out, "--resume")
    assert "no checkpoint: starting at step 0" in capsys.readouterr().out
    assert lines(out, "train")[-1]["step"] == 6


def test_a_full_disk_leaves_the_last_good_checkpoint(config_file, tmp_path, execute):
    out = tmp_path / "run"
    run(config_file, out, "--train.max_steps=2", "--schedule.decay_steps=6")

    def limit_files():
        size = (out / "checkpoints/step_00000002/model.safetensors").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))

    failed = execute.start("train.py", config_file, f"--out_dir={out}", "--resume", preexec_fn=limit_files)
    output, _ = failed.communicate(timeout=60)
    assert failed.returncode == 1, output
    assert "cannot write the checkpoint of step 6" in output and "the last good one is" in output and "step_00000002" in output
    run(config_file, out, "--resume")
    run(config_file, tmp_path / "whole")
    assert_same_weights(weights(out, 6), weights(tmp_path / "whole", 6))


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, "SIGTERM"), (signal.SIGKILL, None)])
def test_two_processes_end_together(config_file, tmp_path, execute, number, status):
    """SIGTERM to torchrun: a checkpoint. SIGKILL of one process: the job ends, and goes on from its last checkpoint."""
    out = tmp_path / "run"
    flags = ("--train.max_steps=100000", "--train.checkpoint_interval=2", "--train.batch_size=4")
    process = execute.start(*torchrun(2, config_file, f"--out_dir={out}", *flags))
    wait_for_step(out, 5, process)
    if number == signal.SIGTERM:
        process.send_signal(number)
    else:
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(children[-1]), number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, output
    stopped = max(int(path.name[5:]) for path in (out / "checkpoints").glob("step_*"))
    if status:
        assert json.loads((out / "run.json").read_text())["exit_reason"] == status
        assert stopped == lines(out, "train")[-1]["step"]
    run(config_file, out, *flags[1:2], f"--train.max_steps={stopped + 1}", "--schedule.decay_steps=100000", "--resume")
    assert lines(out, "train")[-1]["step"] == stopped + 1


def test_resuming_on_other_data_is_refused(config_file, tmp_path):
    from data.prepare import main as prepare

    (tmp_path / "a.txt").write_text("one text " * 500)
    (tmp_path / "b.txt").write_text("two text " * 500)
    flags = (f"--data.dataset={tmp_path / 'data'}", "--schedule.decay_steps=6")
    prepare([str(tmp_path / "a.txt"), "--tokenizer", "bytes", "--out", str(tmp_path / "data")])
    run(config_file, tmp_path / "run", *flags, "--train.max_steps=2")
    prepare([str(tmp_path / "b.txt"), "--tokenizer", "bytes", "--out", str(tmp_path / "data"), "--overwrite"])
    with pytest.raises(InputError, match="not the one this run was trained on .checksum differ"):
        run(config_file, tmp_path / "run", *flags, "--resume")


def test_bfloat16_accumulates_and_resumes_bitwise(config_file, tmp_path):
    flags = ("--train.precision=bfloat16", "--head.name=cosine", "--train.batch_size=4", "--train.gradient_accumulation_steps=2")
    run(config_file, tmp_path / "whole", *flags)
    run(config_file, tmp_path / "parts", *flags, "--train.max_steps=3", "--schedule.decay_steps=6")
    run(config_file, tmp_path / "parts", *flags, "--resume")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_same_weights(weights(tmp_path / "parts", 6), weights(tmp_path / "whole", 6))


@pytest.mark.parametrize("scale, overflows", [(2.0**126, True), (2.0**10, False)])
def test_an_overflow_of_scaled_gradients_repeats_the_step_at_half_the_scale(config_file, tmp_path, capsys, monkeypatch, scale, overflows):
    class Scaled(Precision):  # float16's scaler, on float32 products, which a CPU can do
        def __init__(self, name, device):
            super().__init__("float32", device)
            self.scaler = GradScaler("cpu", init_scale=scale)

    run(config_file, tmp_path / "plain")
    monkeypatch.setattr(train, "Precision", Scaled)
    run(config_file, tmp_path / "scaled")
    skipped = [line["skipped"] for line in lines(tmp_path / "scaled", "train")]
    assert (sum(skipped) > 0) == overflows == ("update skipped; scale now" in capsys.readouterr().out)
    assert losses(tmp_path / "scaled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


def test_twenty_overflows_in_a_row_stop_the_run(config_file, tmp_path, monkeypatch):
    class Hopeless(Precision):
        def __init__(self, name, device):
            super().__init__("float32", device)
            self.scaler = GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.999)

    monkeypatch.setattr(train, "Precision", Hopeless)
    with pytest.raises(RunFailed, match="step 1: 20 float16 gradient overflows in a row"):
        run(config_file, tmp_path / "run")


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--optimizer.learning_rate=1e-4"], "optimizer.learning_rate"),
        (["--head.name=cosine"], "head.name"),
        (["--seed=8"], "seed"),
        (["--train.batch_size=4"], "batch_size x train.gradient_accumulation_steps x processes was 8 and is now 4"),
    ],
)
def test_resuming_as_another_run_is_refused_by_name(config_file, tmp_path, flags, named):
    run(config_file, tmp_path / "run", "--train.max_steps=2", "--schedule.decay_steps=6")
    with pytest.raises(InputError, match=named):
        run(config_file, tmp_path / "run", "--resume", *flags)
    run(config_file, tmp_path / "run", "--resume", "--train.batch_size=2", "--train.gradient_accumulation_steps=4", "--log.interval=1")


# --------------------------------------------------------------------------------------------------- faults, bad input


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(config_file, tmp_path):
    out = tmp_path / "run"
    flags = ("--optimizer.learning_rate=1e30", "--train.grad_clip=0", "--train.checkpoint_interval=1", "--train.max_steps=50")
    with pytest.raises(RunFailed, match=r"step \d+: the loss is .* nothing was updated"):
        run(config_file, out, *flags)
    last = lines(out, "train")[-1]["step"]
    assert all(math.isfinite(loss) for loss in losses(out))
    assert f"step {last + 1}" in json.loads((out / "run.json").read_text())["exit_reason"]


BAD = {
    "no tracker": (["--log.wandb=true"], "pip install wandb"),
    "unknown head": (["--head.name=cosinus"], "cosinus.*cosine"),
    "misspelt key": (["--train.batchsize=8"], "train.batch_size"),
    "wrong type": (["--train.batch_size=abc"], "batch_size.*whole number"),
    "no such country": (["--emissions.enabled=true", "--emissions.country_iso_code=FRB"], "has no data for it; did you mean"),
    "no cuda": (["--train.device=cuda"], "no cuda device"),
    "no dataset": (["--data.dataset=/nowhere"], "python -m data.prepare"),
    "block too long": (["--model.block_size=1000000"], "block_size"),
    "option of another head": (["--head.p=3"], "p"),
    "too few rows": (["--model.vocab_size=100"], "at least 257"),
    "float16 on a cpu": (["--train.precision=float16"], "needs CUDA"),
    "shape": (["--model.n_head=3"], "32.*3"),
}


@pytest.mark.parametrize("flags, named", BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_before_anything_is_written(config_file, tmp_path, flags, named):
    if torch.cuda.is_available() and "--train.device=cuda" in flags:
        pytest.skip("this machine has CUDA")
    with pytest.raises(InputError, match=named):
        run(config_file, tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [["--train.batchsize=8"], ["--head.name=cosinus"], ["--data.dataset=/nowhere"]])
def test_bad_input_is_one_line_and_status_2(config_file, tmp_path, execute, flags):
    done = execute("train.py", config_file, f"--out_dir={tmp_path / 'run'}", *flags)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_used_folder_is_refused_and_overwritten_only_on_request(config_file, tmp_path):
    out = tmp_path / "run"
    run(config_file, out, "--train.max_steps=3")
    with pytest.raises(InputError, match="not empty"):
        run(config_file, out)
    with pytest.raises(InputError):
        run(config_file, out, "--overwrite", "--head.name=cosinus")
    assert len(losses(out)) == 3, "a refused run overwrites nothing"
    run(config_file, out, "--overwrite")
    assert len(losses(out)) == 6


def test_print_config_prints_a_config_that_loads(config_file, tmp_path, capsys):
    train.main([str(config_file), "--print-config"])
    printed = capsys.readouterr().out
    (tmp_path / "printed.toml").write_text(printed)
    assert "vocab_size = 320" in printed and "warmup_steps = 0" in printed
    run(tmp_path / "printed.toml", tmp_path / "run")


@pytest.mark.slow
def test_without_a_compiler_training_goes_on_after_one_warning(config_file, tmp_path, execute):
    out = tmp_path / "run"
    cache = str(tmp_path / "cache")
    done = execute("train.py", config_file, f"--out_dir={out}", "--train.compile=true", "--model.n_layer=1", CXX="/bin/false", TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch.compile does not work here") == 1
    run(config_file, tmp_path / "eager", "--model.n_layer=1")
    assert losses(out) == losses(tmp_path / "eager")


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_an_eager_one(config_file, tmp_path, execute):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(config_file, tmp_path / "compiled", "--train.compile=true", "--model.n_layer=1")
    two = execute(*torchrun(2, config_file, f"--out_dir={tmp_path / 'two'}", "--train.compile=true", "--model.n_layer=1", "--train.batch_size=4"))
    assert two.returncode == 0 and "does not work here" not in two.stderr, two.stderr
    run(config_file, tmp_path / "eager", "--model.n_layer=1")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("flags", [(), ("--train.precision=bfloat16", "--train.compile=true"), ("--train.precision=float16",)], ids=str)
def test_a_gpu_trains_as_the_cpu_does(config_file, tmp_path, flags):
    for head in ("linear", "cosine", "manhattan"):
        words = (f"--head.name={head}", "--train.max_steps=20", "--eval.interval=20")
        run(config_file, tmp_path / f"cpu_{head}", *words)
        run(config_file, tmp_path / f"cuda_{head}", *words, "--train.device=cuda", *flags)
        cpu, cuda = (lines(tmp_path / f"{device}_{head}", "eval")[-1]["val_nll"] for device in ("cpu", "cuda"))
        assert cuda == pytest.approx(cpu, rel=2e-2)
