"""Splitting energy over scopes and intervals: exact sums with a fake source, and the real CodeCarbon in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import InputError
from config.schema import EmissionsConfig
from training import emissions
from training.emissions import COLUMNS, EmissionsMeter, read_rows, totals
from training.energy import Energy, Node

ROOT = Path(__file__).parents[2]


class FakeSource:
    """A machine that draws what the test says: `use(kwh)` and `wait(seconds)` move it and the clock."""

    country, method, g_per_kwh = "world average", "cpu: estimate (cpu load)", 500.0

    def __init__(self):
        self.kwh = 3.0  # CodeCarbon's readings need not begin at zero
        self.seconds = 1000.0
        self.stopped = 0
        self.fails = False

    def use(self, kwh, seconds=1.0):
        self.kwh += kwh
        self.seconds += seconds

    def read(self):
        if self.fails:
            raise OSError("the sensor is gone")
        return Energy(self.kwh, 0.5 * self.kwh, 0.25 * self.kwh, 0.25 * self.kwh)

    def stop(self):
        self.stopped += 1

    def describe(self):
        return {"country": self.country}


@pytest.fixture
def source(monkeypatch):
    source = FakeSource()
    monkeypatch.setattr(emissions, "CodeCarbon", lambda country, gpu_ids: source)
    monkeypatch.setattr(emissions.time, "perf_counter", lambda: source.seconds)
    return source


def meter_at(tmp_path, step=0, interval=10, **options):
    return EmissionsMeter(EmissionsConfig(interval_steps=interval), tmp_path, step, 64, **options)


def train(meter, source, first, last, kwh=2.0, seconds=1.0):
    for step in range(first, last + 1):
        with meter.scope("training"):
            source.use(kwh, seconds)
        meter.step_done(step)


def by_scope(rows, scope):
    return [row for row in rows if row["scope"] == scope]


def test_scopes_and_intervals_add_up(tmp_path, source):
    reported = []
    meter = meter_at(tmp_path, report=reported.append)
    source.use(100.0)  # set-up: nobody's
    with meter.scope("evaluation"):
        source.use(7.0, 5.0)
    train(meter, source, 1, 10)
    with meter.scope("evaluation"):
        source.use(11.0, 3.0)
    with meter.scope("checkpoint"):
        source.use(1.0, 2.0)
    train(meter, source, 11, 14)
    meter.close()
    rows = read_rows(tmp_path)
    assert [(row["scope"], row["first_step"], row["last_step"], row["steps"]) for row in rows] == [
        ("evaluation", 1, 10, 10), ("training", 1, 10, 10), ("checkpoint", 1, 10, 10), ("training", 11, 14, 4),
    ]  # fmt: skip
    assert [row["kwh"] for row in rows] == [18.0, 20.0, 1.0, 8.0]  # deltas: neither the 3 before nor the 100 of the set-up
    assert [row["seconds"] for row in rows] == [8.0, 10.0, 2.0, 4.0]
    assert [row["gco2eq"] for row in rows] == [row["kwh"] * row["g_per_kwh"] for row in rows]
    assert [row["tokens"] for row in rows] == [None, 640, None, 256]
    assert [row["partial"] for row in rows] == [False, False, False, True]
    assert rows[3]["kwh_per_1000_steps"] == 2000.0 and rows[3]["gco2eq_per_1000_steps"] == 1e6
    assert [(row["cpu_kwh"], row["gpu_kwh"], row["ram_kwh"]) for row in rows][3] == (4.0, 2.0, 2.0)
    assert all(row["lost_steps"] == 0 for row in rows)
    assert [{**row, "version": 1, "lost_steps": 0} for row in reported] == rows
    assert source.stopped == 1


def test_the_energy_of_a_scope_survives_many_steps_without_reading_each(tmp_path, source, monkeypatch):
    reads = []
    monkeypatch.setattr(source, "read", lambda: reads.append(1) or FakeSource.read(source))
    meter = meter_at(tmp_path, interval=1000)
    train(meter, source, 1, 20, kwh=1.0)
    assert len(reads) == 1  # entering the scope; a step costs no reading
    meter.close()
    assert read_rows(tmp_path)[0]["kwh"] == 20.0


def test_zero_is_not_missing(tmp_path, source, capsys):
    meter = meter_at(tmp_path)
    train(meter, source, 1, 10, kwh=0.0)
    train(meter, source, 11, 15)
    source.fails = True
    train(meter, source, 16, 20)
    with meter.scope("evaluation"):
        source.use(1.0)
    train(meter, source, 21, 30)
    meter.close()
    zero, unknown, last = by_scope(read_rows(tmp_path), "training")
    assert (zero["kwh"], zero["gco2eq"]) == (0.0, 0.0)
    for row in (unknown, last):
        assert (row["kwh"], row["gco2eq"], row["kwh_per_1000_steps"], row["g_per_kwh"]) == (None,) * 4
        assert row["seconds"] == 10.0 and row["method"] == "failed"
    assert capsys.readouterr().err.count("warning") == 1
    assert meter.describe()["total"]["training"] == {"kwh": None, "gco2eq": None, "seconds": 30.0}
    assert "sensor is gone" in meter.describe()["error"]
    lines = (tmp_path / "emissions.csv").read_text(encoding="utf-8").splitlines()
    assert lines[1].split(",")[7] == "0.0" and lines[2].split(",")[7] == ""


def test_a_resumed_run_goes_on_counting_and_shows_lost_steps_apart(tmp_path, source):
    first = meter_at(tmp_path)
    train(first, source, 1, 26)
    first.close()  # stopped at 26; its last checkpoint is 14
    second = meter_at(tmp_path, step=14)
    train(second, source, 15, 30, kwh=3.0)
    second.close()
    rows = by_scope(read_rows(tmp_path), "training")
    assert [(row["session"], row["first_step"], row["last_step"], row["lost_steps"], row["partial"]) for row in rows] == [
        (1, 1, 10, 0, False), (1, 11, 20, 6, False), (1, 21, 26, 6, True), (2, 15, 20, 0, True), (2, 21, 30, 0, False),
    ]  # fmt: skip
    sums = second.describe()
    assert sums["total"]["training"] == {"kwh": 26 * 2.0 + 16 * 3.0, "gco2eq": 50_000.0, "seconds": 42.0}
    assert sums["lost"] == {"kwh": 24.0, "gco2eq": 12_000.0, "seconds": 12.0}


def test_a_node_that_joins_later_counts_the_run_s_sessions(tmp_path, source):
    first = meter_at(tmp_path)
    train(first, source, 1, 10)
    first.close()
    for index in (0, 1):
        second = meter_at(tmp_path, step=10, node=Node(index=index), session=2)
        train(second, source, 11, 20)
        second.close()
    rows = read_rows(tmp_path)
    assert [(row["node"], row["session"], row["lost_steps"]) for row in by_scope(rows, "training")] == [(0, 1, 0), (0, 2, 0), (1, 2, 0)]


def test_lost_steps_are_known_before_the_new_session_has_a_row(tmp_path, source):
    first = meter_at(tmp_path)
    train(first, source, 1, 10)
    first.close()
    second = meter_at(tmp_path, step=4)
    assert second.describe()["lost"]["kwh"] == 12.0
    second.close()


def test_a_killed_session_leaves_its_open_interval_to_the_next(tmp_path, source):
    first = meter_at(tmp_path, interval=1000)
    with first.scope("evaluation"):
        source.use(5.0, 1.0)
    train(first, source, 1, 31, seconds=1.0)  # the heartbeat is at 30 s of session time, the kill at 32 s
    assert not (tmp_path / "emissions.csv").exists()
    reported = []
    second = meter_at(tmp_path, step=20, interval=1000, report=reported.append)
    second.close()
    rows = read_rows(tmp_path, {2: 20})
    written = {row["scope"]: (row["session"], row["last_step"], row["kwh"], row["partial"], row["lost_steps"]) for row in rows}
    assert written == {"evaluation": (1, 30, 5.0, True, 10), "training": (1, 30, 60.0, True, 10)}
    assert [row["scope"] for row in reported] == ["evaluation", "training"]
    third = meter_at(tmp_path, step=20, interval=1000)
    assert third.session == 2 and read_rows(tmp_path, {2: 20}) == rows  # recovered once, not twice
    third.close()


def test_a_kill_between_row_and_clean_up_counts_nothing_twice(tmp_path, source):
    first = meter_at(tmp_path)
    train(first, source, 1, 10)
    pending = json.dumps(first.rows())
    first.close()
    first.pending.write_text(pending, encoding="utf-8")
    meter_at(tmp_path, step=10).close()
    assert [row["kwh"] for row in read_rows(tmp_path)] == [18.0 + 2.0]


def test_several_nodes_write_apart_and_are_summed(tmp_path, source):
    for index in (0, 1):
        meter = meter_at(tmp_path, node=Node(index=index))
        train(meter, source, 1, 10, kwh=1.0 + index)
        meter.close()
    rows = read_rows(tmp_path)
    assert [(row["node"], row["kwh"], row["tokens"]) for row in rows] == [(0, 10.0, 640), (1, 20.0, 640)]
    assert totals(rows)["total"]["training"]["kwh"] == 30.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emissions.csv", "emissions.node1.csv"]


@pytest.mark.parametrize("options", [{"settings": EmissionsConfig(enabled=False)}, {"node": Node(leads=False)}])
def test_where_nothing_is_to_be_measured_nothing_happens(tmp_path, source, options):
    meter = EmissionsMeter(options.get("settings", EmissionsConfig()), tmp_path, 0, node=options.get("node", Node()))
    train(meter, source, 1, 3)
    meter.close()
    assert meter.describe() is None and not list(tmp_path.iterdir()) and source.stopped == 0


def test_a_run_that_fails_before_its_first_step(tmp_path, source):
    meter = meter_at(tmp_path)
    with meter.scope("evaluation"):
        source.use(4.0)
    meter.close()
    meter.close()
    (row,) = read_rows(tmp_path)
    assert (row["first_step"], row["last_step"], row["steps"], row["kwh"], row["kwh_per_1000_steps"]) == (0, 0, 0, 4.0, None)
    assert source.stopped == 1


def test_a_tracker_that_cannot_start_is_one_warning(tmp_path, monkeypatch, capsys):
    def broken(country, gpu_ids):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(emissions, "CodeCarbon", broken)
    meter = meter_at(tmp_path)
    train(meter, FakeSource(), 1, 25)
    meter.close()
    rows = read_rows(tmp_path)
    assert [row["kwh"] for row in rows] == [None, None, None] and [row["steps"] for row in rows] == [10, 10, 5]
    assert capsys.readouterr().err.count("warning: emissions: RuntimeError: no such thing") == 1


def test_a_wrong_country_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="FRB.*CodeCarbon has no data"):
        EmissionsMeter(EmissionsConfig(country_iso_code="FRB"), tmp_path, 0)


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path, source, capsys):
    (tmp_path / "emissions.csv").mkdir()
    meter = meter_at(tmp_path)
    train(meter, source, 1, 25)
    meter.close()
    assert capsys.readouterr().err.count("warning") == 1


def test_a_file_of_another_schema_is_set_aside(tmp_path, source, capsys):
    (tmp_path / "emissions.csv").write_text("timestamp,emissions\n1,2\n", encoding="utf-8")
    meter = meter_at(tmp_path)
    train(meter, source, 1, 10)
    meter.close()
    assert (tmp_path / "emissions.csv.1.old").read_text(encoding="utf-8") == "timestamp,emissions\n1,2\n"
    assert [row["kwh"] for row in read_rows(tmp_path)] == [20.0]
    assert "kept as" in capsys.readouterr().err
    assert (tmp_path / "emissions.csv").read_text(encoding="utf-8").splitlines()[0] == ",".join(COLUMNS)


def test_a_row_cut_short_by_a_crash_is_left_out(tmp_path, source):
    meter = meter_at(tmp_path)
    train(meter, source, 1, 10)
    meter.close()
    path = tmp_path / "emissions.csv"
    path.write_text(path.read_text(encoding="utf-8") + "1,1,0,11,", encoding="utf-8")
    again = meter_at(tmp_path, step=10)
    train(again, source, 11, 20)
    again.close()
    assert [(row["first_step"], row["kwh"]) for row in read_rows(tmp_path)] == [(1, 20.0), (11, 20.0)]


REAL = """
import sys, threading, time
from pathlib import Path
import socket
attempts = []  # recorded, for CodeCarbon swallows exceptions
def refuse(*arguments, **options):
    attempts.append(arguments)
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = refuse
from config.schema import EmissionsConfig
from training.emissions import EmissionsMeter
meter = EmissionsMeter(EmissionsConfig(interval_steps=5, country_iso_code={country!r}), Path({folder!r}), 0, 100)
for step in range(1, 8):
    with meter.scope("training"):
        until = time.perf_counter() + 0.1
        while time.perf_counter() < until:
            sum(range(1000))
    meter.step_done(step)
    if step == 5:
        with meter.scope("evaluation"):
            time.sleep(0.2)
    if step == 6 and {kill}:
        raise KeyboardInterrupt
meter.close()
print(meter.describe())
print("threads", [thread for thread in threading.enumerate() if thread is not threading.main_thread()], "network", attempts)
"""


def really(tmp_path, country=None, kill=False, **environment):
    code = REAL.format(folder=str(tmp_path / "run"), country=country, kill=kill)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)


def test_codecarbon_itself_quiet_offline_and_by_interval(tmp_path):
    done = really(tmp_path, CODECARBON_ELECTRICITYMAPS_API_TOKEN="x", CODECARBON_SAVE_TO_API="true")
    assert done.stderr == "" and done.returncode == 0
    description, threads = done.stdout.splitlines()
    assert threads == "threads [] network []"
    assert "'country': 'world average'" in description and "'g_per_kwh': 475.0" in description and "'error': None" in description
    rows = read_rows(tmp_path / "run")
    assert [(row["scope"], row["first_step"], row["last_step"], row["partial"]) for row in rows] == [
        ("training", 1, 5, False), ("evaluation", 1, 5, False), ("training", 6, 7, True),
    ]  # fmt: skip
    for row in rows:
        watts = 3.6e6 * row["kwh"] / row["seconds"]
        assert 0.5 < watts < 5000, "a machine draws between half a watt and five kilowatts"
        assert row["gco2eq"] == pytest.approx(475.0 * row["kwh"], rel=1e-12)
        assert row["kwh"] == pytest.approx(row["cpu_kwh"] + row["gpu_kwh"] + row["ram_kwh"], rel=1e-6)
        assert "ram: estimate" in row["method"]
    assert rows[0]["seconds"] == pytest.approx(0.5, abs=0.3) and rows[1]["seconds"] == pytest.approx(0.2, abs=0.3)
    assert not list(tmp_path.glob("*.csv")) and [path.name for path in (tmp_path / "run").iterdir()] == ["emissions.csv"]


def test_codecarbon_itself_knows_countries(tmp_path):
    done = really(tmp_path, country="FRA")
    assert done.returncode == 0
    rows = read_rows(tmp_path / "run")
    assert {row["country"] for row in rows} == {"FRA"}
    assert all(0 < row["g_per_kwh"] < 150 for row in rows)  # mostly nuclear: Canada's 170 and the world's 475 are both wrong


def test_an_exception_leaves_no_thread_that_keeps_the_process(tmp_path):
    started = time.monotonic()
    done = really(tmp_path, kill=True)
    assert done.returncode == -signal.SIGINT and time.monotonic() - started < 60
    assert "Traceback" in done.stderr and "codecarbon" not in done.stderr


def test_without_emissions_codecarbon_is_not_imported(tmp_path):
    code = (
        "import sys; from pathlib import Path; from config.schema import EmissionsConfig; from training.emissions import EmissionsMeter\n"
        f"meter = EmissionsMeter(EmissionsConfig(enabled=False), Path({str(tmp_path)!r}), 0)\n"
        "with meter.scope('training'): pass\n"
        "meter.step_done(1); meter.close(); print([name for name in sys.modules if name.split('.')[0] in ('codecarbon', 'pandas')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
