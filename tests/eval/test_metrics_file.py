import json
import math

import numpy as np
import pytest

from eval.metrics_file import read_metrics


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return read_metrics(path)


def train(step, **more):
    return {"kind": "train", "step": step, **more}


def evaluation(step, **more):
    return {"kind": "eval", "step": step, **more}


def test_kinds_are_told_apart_and_columns_are_floats(tmp_path):
    metrics = write(
        tmp_path / "m.jsonl", evaluation(0, val_nll=5.0), train(1, loss=4), train(2, loss=None), {"kind": "emissions", "kwh": 0.1}
    )
    assert [line["step"] for line in metrics.train] == [1, 2]
    assert metrics.eval[0]["val_nll"] == 5.0 and metrics.emissions == [{"kind": "emissions", "kwh": 0.1}]
    np.testing.assert_array_equal(metrics.column("loss"), [4.0, math.nan])


def test_non_finite_numbers_come_back_as_numbers(tmp_path):
    metrics = write(tmp_path / "m.jsonl", train(1, loss="inf", grad_norm="nan"), evaluation(1, val_nll="-inf", prototypes={"a": ["nan"]}))
    assert metrics.train[0]["loss"] == math.inf and math.isnan(metrics.train[0]["grad_norm"])
    assert metrics.eval[0]["val_nll"] == -math.inf and math.isnan(metrics.eval[0]["prototypes"]["a"][0])


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_file_cut_in_the_middle_of_a_line_is_read_up_to_there(tmp_path, cut):
    text = "".join(json.dumps(train(step, loss=1.5, grad_norm=0.25)) + "\n" for step in (1, 2, 3))
    path = tmp_path / "m.jsonl"
    path.write_bytes(text.encode()[: -1 - cut])
    metrics = read_metrics(path)
    assert [line["step"] for line in metrics.train] == [1, 2]
    assert metrics.unreadable == 1


def test_cut_inside_a_character(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(json.dumps(train(1)).encode() + b"\n" + '{"kind": "train", "note": "é'.encode()[:-1])
    assert [line["step"] for line in read_metrics(path).train] == [1]


def test_after_a_resume_the_later_lines_win_and_lost_steps_go(tmp_path):
    lines = [evaluation(0, val_nll=9.0)]
    lines += [train(step, loss=1.0) for step in range(1, 8)] + [evaluation(7, val_nll=7.0)]  # crashed after 7; the checkpoint is at 4
    lines += [train(5, loss=2.0), train(6, loss=2.0), evaluation(6, val_nll=6.0)]
    metrics = write(tmp_path / "m.jsonl", *lines)
    assert [(line["step"], line["loss"]) for line in metrics.train] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]
    assert [(line["step"], line["val_nll"]) for line in metrics.eval] == [(0, 9.0), (6, 6.0)]
    assert metrics.repeated == 4  # train 5, 6, 7 and the evaluation at 7


def test_an_evaluation_again_at_the_same_step_keeps_the_steps_training(tmp_path):
    metrics = write(tmp_path / "m.jsonl", train(1), train(2), evaluation(2, val_nll=3.0), evaluation(2, val_nll=4.0), train(3))
    assert [line["step"] for line in metrics.train] == [1, 2, 3]
    assert [line["val_nll"] for line in metrics.eval] == [4.0]


def test_emissions_of_lost_steps_stay(tmp_path):
    spent = {"kind": "emissions", "first_step": 1, "last_step": 7, "kwh": 1.0}
    metrics = write(tmp_path / "m.jsonl", train(7), spent, train(5), spent)
    assert len(metrics.emissions) == 2


def test_no_file_is_no_lines_and_rubbish_is_counted(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl").train == []
    metrics = write(tmp_path / "m.jsonl", "[1, 2]\n", '{"kind": "train"}\n', "\n", train(1))
    assert len(metrics.train) == 1 and metrics.unreadable == 2
