"""Trackers: nothing unless asked for, one line if missing, TensorBoard for real, W&B through a stand-in of its three calls."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from commands import InputError
from config.schema import LogConfig
from training.trackers import Trackers, build_trackers

ROOT = Path(__file__).parents[2]
LINE = {"step": 10, "loss": 2.5, "exponent": None, "name": "x", "skipped": 0, "grad_norm": float("inf")}


def test_without_a_tracker_nothing_happens_and_nothing_is_imported(tmp_path):
    code = (
        "import sys; from config.schema import LogConfig; from training.trackers import build_trackers\n"
        f"trackers = build_trackers(LogConfig(), {str(tmp_path)!r}, {{}}); trackers.log({{'step': 10, 'loss': 1.0}}); trackers.close()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('wandb', 'tensorboard', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_line_with_the_remedy(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # import of it raises ImportError
    with pytest.raises(InputError) as caught:
        build_trackers(LogConfig(**{name: True}), tmp_path, {})
    assert f"log.{name} = true" in str(caught.value) and str(caught.value).endswith(f"pip install {name}")
    assert not list(tmp_path.iterdir())


def test_tensorboard_holds_the_numbers_at_their_steps(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = build_trackers(LogConfig(interval=10, tensorboard=True), tmp_path, {})
    for step in range(1, 31):
        trackers.log({**LINE, "step": step, "loss": 1.0 / step})
    trackers.log({"step": 30, "val_nll": 3.25})
    trackers.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss", "skipped", "val_nll"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step, pytest.approx(1.0 / step, rel=1e-6)) for step in (10, 20, 30)
    ]
    assert [(event.step, event.value) for event in events.Scalars("val_nll")] == [(30, 3.25)]


class FakeWandb(types.ModuleType):
    """`wandb` as far as it is used: setup().settings.api_key, init(...), run.log, run.finish."""

    def __init__(self, api_key):
        super().__init__("wandb")
        self.api_key, self.calls = api_key, []

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(api_key=self.api_key))

    def init(self, **options):
        self.calls.append(("init", options))
        return types.SimpleNamespace(
            log=lambda values, step: self.calls.append(("log", values, step)), finish=lambda: self.calls.append(("finish",))
        )


@pytest.mark.parametrize(("api_key", "variable", "mode"), [(None, None, "offline"), ("key", None, None), (None, "disabled", None)])
def test_wandb_never_asks_for_a_login(tmp_path, monkeypatch, api_key, variable, mode):
    wandb = FakeWandb(api_key)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    trackers = build_trackers(LogConfig(wandb=True), tmp_path, {"seed": 1})
    trackers.log(LINE)
    trackers.close()
    trackers.close()
    options = {"dir": str(tmp_path), "name": tmp_path.name, "config": {"seed": 1}, "mode": mode}
    assert wandb.calls == [("init", options), ("log", {"loss": 2.5, "skipped": 0}, 10), ("finish",)]


def test_a_tracker_that_fails_is_dropped_with_a_warning_and_the_others_go_on(capsys):
    class Broken:
        def log(self, step, values):
            raise ConnectionError("the service is down")

    class Sound:
        seen = []

        def log(self, step, values):
            self.seen.append(step)

        def close(self):
            self.seen.append("closed")

    trackers = Trackers([Broken(), Sound()])
    for step in (1, 2):
        trackers.log({"step": step, "loss": 1.0})
    trackers.close()
    assert Sound.seen == [1, 2, "closed"]
    assert capsys.readouterr().err.splitlines() == ["warning: Broken is switched off: ConnectionError: the service is down"]
