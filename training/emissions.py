"""Energy and emissions of a run, per interval of steps; training, evaluation and checkpointing apart.

    meter = EmissionsMeter(config.emissions, run_dir, step, tokens_per_step, record.emissions, this_node("cuda"))
    with meter.scope("training"): ...       # and "evaluation", "checkpoint"
    meter.step_done(step)
    meter.close()

Each node writes rows to a file of its own (emissions.csv; emissions.node1.csv, ...), and `read_rows` reads them all. What a crash cost
stays counted: a row says which session of the run it belongs to, so the steps beyond the checkpoint that the next session went
on from are known to be lost. Between rows a small file is kept up to date, from which the next session recovers the open interval.
Nothing here can stop or alter training: a failure is one warning, and the figures after it are empty, not zero.
"""

import contextlib
import csv
import io
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commands import InputError
from training.energy import CodeCarbon, Energy, Node

VERSION = 1  # of the columns below; a file with other columns is set aside, never mixed
COLUMNS: dict[str, Callable[[str], Any]] = {
    "version": int, "session": int, "node": int, "first_step": int, "last_step": int, "steps": int, "scope": str, "kwh": float,
    "gco2eq": float, "seconds": float, "tokens": int, "g_per_kwh": float, "cpu_kwh": float, "gpu_kwh": float, "ram_kwh": float,
    "partial": lambda cell: cell == "1", "kwh_per_1000_steps": float, "gco2eq_per_1000_steps": float, "country": str, "method": str,
}  # fmt: skip
SUMMED = ("kwh", "gco2eq", "seconds")
HEARTBEAT_SECONDS = 30  # the most that a SIGKILL can lose, give or take a step
NOTHING = Energy(0.0, 0.0, 0.0, 0.0)
Row = dict[str, Any]


class EmissionsMeter:
    """Splits the energy of this node over scopes and intervals of steps."""

    def __init__(
        self,
        settings: Any,
        run_dir: Path,
        step: int,
        tokens_per_step: int = 0,
        report: Callable[[Row], None] = lambda row: None,
        node: Node = Node(),
        session: int = 1,
    ):
        """Begins to measure; what happens before the first scope is not counted.

        settings: the [emissions] section (`enabled`, `interval_steps`, `country_iso_code`). step: updates done so far.
        tokens_per_step: input tokens of one update, all processes. report: called with each finished row.
        node: from `this_node`; on a process that does not lead its node, or with `enabled` false, every method does nothing.
        session: the run's count of its sessions, which a node that joins later must share with the others.
        Raises InputError for a country that is not known.
        """
        self.enabled = self.active = settings.enabled and node.leads
        self.source: CodeCarbon | None = None
        if not self.active:
            return
        self.interval, self.tokens_per_step, self.report, self.node = settings.interval_steps, tokens_per_step, report, node
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / file_name(node.index)
        self.pending = self.run_dir / f".{self.path.stem}.pending.json"
        self.step = self.start = self.first_step = step  # updates done: by now, when the interval began, when this session began
        self.current: str | None = None  # scope
        self.sums: dict[str, list[float]] = {}  # scope -> [seconds, kWh total, cpu, gpu, ram]
        self.time, self.energy = time.perf_counter(), NOTHING
        self.saved = self.time  # when the pending file was last written
        self.error: str | None = None
        self.session = max(session, self.attempt(self.recover) or 1)
        self.source = self.attempt(CodeCarbon, settings.country_iso_code, node.gpu_ids)
        self.failed = self.source is None

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """What runs inside counts to `name`, and so does what follows, until the next scope."""
        if self.active and (name != self.current or (name == "training" and self.interval_is_complete())):
            self.measure()
            if name == "training" and self.interval_is_complete():
                self.finish_interval()  # only now: evaluation and checkpoint of its last step belong to it
            self.current = name
        yield

    def step_done(self, step: int) -> None:
        """`step` updates are done now."""
        if not self.active:
            return
        self.step = step
        if time.perf_counter() - self.saved > HEARTBEAT_SECONDS:
            self.measure()
            self.attempt(replace_text, self.pending, json.dumps(self.rows()))
            self.saved = time.perf_counter()

    def close(self) -> None:
        """Writes the open interval, and ends the tracker with its threads. May be called twice."""
        if not self.active:
            return
        self.measure()
        self.finish_interval()
        if self.source is not None:
            self.attempt(self.source.stop)
        self.active = False

    def describe(self) -> dict | None:
        """For run.json: how it was measured, and the sums so far, over all sessions and nodes. None where nothing is measured."""
        if not self.enabled:
            return None
        how = self.attempt(self.source.describe) if self.source else None
        sums = self.attempt(lambda: totals(read_rows(self.run_dir, {self.session: self.first_step})))
        return {**(how or {}), **(sums or {}), "error": self.error}

    # -------------------------------------------------------------------------------------------------- inside

    def interval_is_complete(self) -> bool:
        return self.step > self.start and self.step % self.interval == 0

    def measure(self) -> None:
        """Gives what was used since the last call to the current scope."""
        now = time.perf_counter()
        energy = None if self.failed else self.attempt(self.source.read)
        if energy is None:
            self.failed, energy = True, self.energy
        if self.current is not None:
            spent = [now - self.time, *(after - before for after, before in zip(energy, self.energy, strict=True))]
            sums = self.sums.setdefault(self.current, [0.0] * len(spent))
            self.sums[self.current] = [a + b for a, b in zip(sums, spent, strict=True)]
        self.time, self.energy = now, energy

    def rows(self) -> list[Row]:
        """The open interval, one row per scope that took time."""
        return [self.row(scope, seconds, kwh) for scope, (seconds, *kwh) in self.sums.items()]

    def row(self, scope: str, seconds: float, kwh: list[float]) -> Row:
        steps = self.step - self.start
        about = {
            "version": VERSION, "session": self.session, "node": self.node.index, "first_step": self.start + bool(steps),
            "last_step": self.step, "steps": steps, "scope": scope, "seconds": seconds,
            "tokens": steps * self.tokens_per_step if scope == "training" else None, "partial": steps != self.interval,
        }  # fmt: skip
        if self.failed:
            return {**dict.fromkeys(COLUMNS), **about, "method": "failed"}
        total, cpu, gpu, ram = kwh
        gram = self.source.g_per_kwh
        measured = {
            "kwh": total, "gco2eq": total * gram, "g_per_kwh": gram, "cpu_kwh": cpu, "gpu_kwh": gpu, "ram_kwh": ram,
            "country": self.source.country, "method": self.source.method,
        }  # fmt: skip
        if steps:
            measured |= {"kwh_per_1000_steps": total * 1000 / steps, "gco2eq_per_1000_steps": total * gram * 1000 / steps}
        return {**dict.fromkeys(COLUMNS), **about, **measured}

    def finish_interval(self) -> None:
        rows = self.rows()
        self.start, self.sums = self.step, {}
        self.attempt(self.publish, rows)
        self.saved = time.perf_counter()

    def publish(self, rows: list[Row]) -> None:
        append_rows(self.path, rows)
        for row in rows:
            self.report({name: value for name, value in row.items() if name != "version"})
        self.pending.unlink(missing_ok=True)

    def recover(self) -> int:
        """Publishes what a killed session left pending. Returns the number of this session, counted from 1."""
        set_aside_other_schema(self.path)
        written = read_file(self.path)
        left = json.loads(self.pending.read_text(encoding="utf-8")) if self.pending.exists() else []
        seen = {(row["session"], row["scope"], row["first_step"]) for row in written}
        fresh = [row for row in left if (row["session"], row["scope"], row["first_step"]) not in seen]
        self.publish(fresh)
        return 1 + max((row["session"] for row in written + fresh), default=0)

    def attempt(self, action: Callable, *arguments: Any) -> Any:
        """What `action` returns, or None if it fails: training goes on. The first failure is printed. A wrong setting is no failure."""
        try:
            return action(*arguments)
        except InputError:
            raise
        except Exception as error:  # whatever it is: nothing here is worth a training run
            if self.error is None:
                self.error = f"{type(error).__name__}: {error}"
                print(f"warning: emissions: {self.error}; training goes on, the figures may be empty", file=sys.stderr, flush=True)
            return None


def file_name(node: int) -> str:
    return "emissions.csv" if node == 0 else f"emissions.node{node}.csv"


def append_rows(path: Path, rows: list[Row]) -> None:
    """Adds rows, and the header to a new file, in one write."""
    if not rows:
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    elif not path.read_bytes().endswith(b"\n"):
        text.write("\n")  # a crash cut the last row short: it ends here
    writer.writerows({name: int(value) if isinstance(value, bool) else value for name, value in row.items()} for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, text.getvalue().encode("utf-8"))
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_file(path: Path) -> list[Row]:
    """Rows of one file; none if it is missing or has other columns. A row that a crash cut short is left out."""
    if not path.exists() or not has_our_columns(path):
        return []
    with open(path, encoding="utf-8", newline="") as lines:
        cells = [line for line in list(csv.reader(lines))[1:] if len(line) == len(COLUMNS)]
    return [{name: kind(cell) if cell else None for (name, kind), cell in zip(COLUMNS.items(), line, strict=True)} for line in cells]


def has_our_columns(path: Path) -> bool:
    with open(path, encoding="utf-8", newline="") as lines:
        return next(csv.reader(lines), None) == list(COLUMNS)


def set_aside_other_schema(path: Path) -> None:
    if path.exists() and not has_our_columns(path):
        kept = next(name for number in itertools.count(1) if not (name := path.with_name(f"{path.name}.{number}.old")).exists())
        os.replace(path, kept)
        print(f"warning: {path} has other columns than this version writes; kept as {kept}", file=sys.stderr, flush=True)


def read_rows(run_dir: Path, sessions: dict[int, int] | None = None) -> list[Row]:
    """All rows of a run, all sessions and nodes, each with `lost_steps`: how many of its steps a crash undid.

    A later session that went on from step s undid the steps beyond s. sessions: {session: s}, of a session that has no rows yet.
    """
    rows = [row for path in sorted(Path(run_dir).glob("emissions*.csv")) for row in read_file(path)]
    began = dict(sessions or {})
    for row in rows:
        step = row["first_step"] - (row["steps"] > 0)
        began[row["session"]] = min(step, began.get(row["session"], step))
    for row in rows:
        later = [step for session, step in began.items() if session > row["session"]]
        kept_until = min(later, default=row["last_step"])
        row["lost_steps"] = min(row["steps"], max(0, row["last_step"] - kept_until))
    return rows


def totals(rows: list[Row]) -> dict[str, dict]:
    """{"total": {scope: sums}, "lost": sums}: kWh, gCO2eq and seconds; None where a part of the sum is unknown. `lost` is a part of the total."""
    total: dict[str, dict] = {}
    lost = dict.fromkeys(SUMMED, 0.0)
    for row in rows:
        sums = total.setdefault(row["scope"], dict.fromkeys(SUMMED, 0.0))
        share = row["lost_steps"] / row["steps"] if row["steps"] else 0.0
        for name in SUMMED:
            known = row[name] is not None
            sums[name] = sums[name] + row[name] if known and sums[name] is not None else None
            if share:
                lost[name] = lost[name] + share * row[name] if known and lost[name] is not None else None
    return {"total": total, "lost": lost}
