import json
import math

import pytest
import torch

from commands import InputError
from training.record import Record, check_folder, describe_machine, peak_memory_mb, read_json, rewind_metrics, strict_json


def lines(run_dir):
    return [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]


def begin(run_dir, step=0):
    record = Record(run_dir, active=True, log_interval=2)
    record.begin("seed = 1\n", {"seed": 1, "world_size": 1}, (step, 10), resumed=step > 0)
    return record


def test_lines_reach_the_file_as_they_are_written_and_every_step_is_there(tmp_path, capsys):
    record = begin(tmp_path / "run")
    record.evaluation({"step": 0, "val_nll": 5.0, "pca5": None})
    for step in (1, 2, 3):
        record.train({"step": step, "loss": 1.5, "lr": 1e-3, "grad_norm": math.inf})
        assert lines(tmp_path / "run")[-1] == {"kind": "train", "step": step, "loss": 1.5, "lr": 1e-3, "grad_norm": "inf"}
    shown = capsys.readouterr().out
    assert "step      2 | loss 1.5000 | lr 1.00e-03 | grad_norm inf" in shown
    assert "step      3" not in shown, "log.interval = 2"
    assert "val_nll 5.0000" in shown and "pca5" not in shown
    record.end("finished")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["exit_reason"] == "finished" and about["started"] <= about["ended"]
    assert about["versions"]["torch"] == torch.__version__


def test_other_processes_write_nothing(tmp_path):
    record = Record(tmp_path / "run", active=False, log_interval=1)
    record.begin("", {}, (0, 1))
    record.train({"step": 1, "loss": 0.0})
    record.evaluation({"step": 1})
    record.say("hello")
    record.end("finished")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_drops_what_it_will_do_again_and_keeps_its_emissions(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kinds = [("eval", 0), ("train", 1), ("train", 2), ("emissions", None), ("train", 3), ("eval", 3)]
    rows = [{"kind": kind, "step": step} if step is not None else {"kind": kind, "first_step": 1, "last_step": 3} for kind, step in kinds]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "train", "st')
    rewind_metrics(path, 2)
    assert lines(tmp_path) == rows[:4]


def test_a_resumed_run_remembers_its_earlier_sessions(tmp_path):
    begin(tmp_path / "run").end("SIGTERM")
    begin(tmp_path / "run", step=4).end("finished")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [session["exit_reason"] for session in about["earlier_sessions"]] == ["SIGTERM"]


def test_who_may_use_a_folder(tmp_path):
    fresh = tmp_path / "fresh"
    check_folder(fresh, resume=False, overwrite=False)
    with pytest.raises(InputError, match="no run folder"):
        check_folder(fresh, resume=True, overwrite=False)
    fresh.mkdir()
    check_folder(fresh, resume=False, overwrite=False)
    for name in ("config.toml", "run.json", "metrics.jsonl"):
        (fresh / name).write_text("")
    with pytest.raises(InputError, match="not empty.*--resume.*--overwrite"):
        check_folder(fresh, resume=False, overwrite=False)
    check_folder(fresh, resume=True, overwrite=False)
    check_folder(fresh, resume=False, overwrite=True)


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_a_folder_that_is_no_run_is_never_used(tmp_path, how):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="no run folder"):
        check_folder(tmp_path, resume=how == "resume", overwrite=how == "overwrite")


def test_a_run_that_starts_again_starts_empty(tmp_path):
    first = begin(tmp_path / "run")
    first.train({"step": 1, "loss": 1.0})
    first.end("finished")
    (tmp_path / "run" / "checkpoints").mkdir()
    begin(tmp_path / "run").end("finished")
    assert lines(tmp_path / "run") == []
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_strict_json_has_no_bare_infinities():
    text = strict_json({"a": [math.inf, -math.inf, {"b": math.nan}], "c": 1.5, "d": None})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": ["inf", "-inf", {"b": "nan"}], "c": 1.5, "d": None}


def test_the_machine_describes_itself():
    about = describe_machine()
    assert about["hardware"]["cpu_count"] >= 1 and about["versions"]["python"]
    assert 10 < peak_memory_mb(torch.device("cpu")) < 1e6


def test_starting_again_takes_away_what_a_run_wrote_and_nothing_else(tmp_path):
    run_dir = tmp_path / "run"
    begin(run_dir).end("finished")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "step_00000001").mkdir()
    (run_dir / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (run_dir / "notes.txt").write_text("mine")
    begin(run_dir).end("finished")
    assert (run_dir / "notes.txt").read_text() == "mine"
    assert not (run_dir / "checkpoints").exists() and (tmp_path / "elsewhere" / "step_00000001").exists()


@pytest.mark.parametrize("text", ["", "garbage", "[]", "5"])
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match="run.json is damaged"):
        read_json(tmp_path / "run.json")


@pytest.mark.parametrize("line", ["[]", "5", "{}", '{"kind": "train", "step": "x"}', "\ufffd"])
def test_lines_that_mean_nothing_are_dropped(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + '\n{"kind": "train", "step": 1}\n', encoding="utf-8")
    rewind_metrics(path, 5)
    assert lines(tmp_path) == [{"kind": "train", "step": 1}]
