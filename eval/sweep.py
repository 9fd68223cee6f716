"""Trains every combination of families, heads and seeds, evaluates each run, and compares them: one command.

    python -m eval.sweep config/quickstart.toml --heads linear,cosine,euclidean --seeds 1,2,3 --out out/sweep
    python -m eval.sweep config/mine.toml --heads linear,minkowski:p=1.5,cosine:link=gibbs:tau=0.1 --seeds 1,2 --parallel 2

A head is a name, with options after colons (`option=value` of [head], or any `section.key=value`, such as
`cosine:optimizer.learning_rate=3e-3`). Further `--section.key=value` flags hold for every run. Each run gets a config file of its own
in OUT/configs and a folder OUT/NAME. Called again, it goes on: finished runs are kept, interrupted ones resumed, and a run that
fails is reported without stopping the rest.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from commands import InputError, Interrupted, Parser, RunFailed, command
from config import load_config, to_toml
from config.schema import items
from eval.compare import write
from eval.comparison import compare
from eval.report import terminal_table
from eval.run_folder import read_json, read_run
from runs import resolve_if_prepared
from training.checkpoint import write_text

ROOT = Path(__file__).resolve().parent.parent
FINISHED = "finished"  # run.json's exit_reason


@dataclass(frozen=True)
class Plan:
    """One run of the sweep: `name` is its folder's, `toml` its config file's text."""

    name: str
    family: str
    head: str
    seed: int
    toml: str
    out_dir: Path

    @property
    def run_dir(self) -> Path:
        return self.out_dir / self.name

    @property
    def config_path(self) -> Path:
        return self.out_dir / "configs" / f"{self.name}.toml"

    @property
    def log_path(self) -> Path:
        return self.out_dir / "logs" / f"{self.name}.log"


def main(argv: list[str]) -> None:
    parser = Parser(
        prog="python -m eval.sweep", description=__doc__.partition("\n")[0], epilog="Further --section.key=value flags hold for every run."
    )
    parser.add_argument("config", metavar="CONFIG.toml", help="what all runs have in common")
    parser.add_argument("--heads", required=True, help="heads with commas between, each NAME or NAME:option=value:...")
    parser.add_argument("--seeds", required=True, help="whole numbers with commas between; runs are paired by seed")
    parser.add_argument("--family", help="model families with commas between (default: the config's)")
    parser.add_argument("--out", metavar="DIR", help="folder of the sweep (default: out/<config's stem>_sweep)")
    parser.add_argument("--baseline", metavar="HEAD", help="one of --heads (default: linear if it is there, else the first)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    asked, overrides = parser.parse_known_args(argv)
    if asked.parallel < 1:
        raise InputError(f"--parallel must be at least 1, not {asked.parallel}")
    out_dir = Path(asked.out or f"out/{Path(asked.config).stem}_sweep")
    heads = listed(asked.heads, "--heads")
    baseline = asked.baseline or ("linear" if "linear" in heads else heads[0])
    if baseline not in heads:
        raise InputError(f"--baseline {baseline} is not one of --heads {asked.heads}")
    plans = make_plans(
        asked.config, (listed(asked.family, "--family") if asked.family else [None]), heads, seeds(asked.seeds), (out_dir, overrides)
    )
    for plan in plans:
        is_finished(plan)  # a run that cannot be part of this sweep shows before any other is trained
        plan.config_path.parent.mkdir(parents=True, exist_ok=True)
        plan.log_path.parent.mkdir(parents=True, exist_ok=True)
    finished = Sweep(plans, asked.parallel).run()
    if finished:
        compare_runs(finished, baseline, out_dir)
    failed = [plan.name for plan in plans if plan not in finished]
    if failed:
        raise RunFailed(f"{len(failed)} of {len(plans)} runs failed: {', '.join(failed)}; why is at the end of {out_dir / 'logs'}/NAME.log")


def make_plans(path: str, families: list[str | None], heads: list[str], numbers: list[int], rest: tuple[Path, list[str]]) -> list[Plan]:
    """Every combination, as a checked config. Raises InputError for any that is wrong, before anything is written."""
    out_dir, overrides = rest
    common = load_config(path, overrides)
    plans = []
    for family, head, seed in itertools.product(families, heads, numbers):
        family = family or common.model.name
        name, *options = head.split(":")
        flags = [f"--{'' if '.' in option.partition('=')[0] else 'head.'}{option}" for option in options]
        label = f"{family}-{head.replace(':', '-').replace('=', '_').replace('/', '_')}-seed{seed}"
        # the options in the file belong to the file's own head
        kept = [] if name == common.head.name else [f"--{key}=none" for key, value in items(common) if own_option(key, value)]
        settings = [*overrides, *kept, f"--model.name={family}", f"--head.name={name}", f"--seed={seed}", *flags]
        config = replace(load_config(path, settings), out_dir=str(out_dir / label))
        try:
            resolve_if_prepared(config)  # an option that this head does not have shows before the first run
        except ValueError as error:
            raise InputError(f"--heads {head}: {error}") from error
        plans.append(Plan(label, family, head, seed, to_toml(config), out_dir))
    doubled = {plan.name for plan in plans if sum(other.name == plan.name for other in plans) > 1}
    if doubled:
        raise InputError(f"the same run is asked for twice: {', '.join(sorted(doubled))}")
    return plans


def own_option(key: str, value: object) -> bool:
    return key.startswith("head.") and key != "head.name" and value is not None


class Sweep:
    """Runs the plans, up to `parallel` at a time, as processes of their own; a signal stops them with their checkpoints saved."""

    def __init__(self, plans: list[Plan], parallel: int):
        self.plans, self.parallel = plans, parallel
        self.children: set[subprocess.Popen] = set()
        self.lock = threading.Lock()
        self.stopped_by = 0
        self.done = 0

    def run(self) -> list[Plan]:
        """Returns the plans whose runs are finished and evaluated. Raises Interrupted after a signal."""
        before = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with ThreadPoolExecutor(self.parallel) as pool:
                outcomes = list(pool.map(self.attempt, self.plans))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.stopped_by:
            raise Interrupted(self.stopped_by, "the sweep was stopped; the same command goes on with it")
        return [plan for plan, good in zip(self.plans, outcomes, strict=True) if good]

    def attempt(self, plan: Plan) -> bool:
        started = time.monotonic()
        if self.stopped_by:
            return False
        kept = is_finished(plan)
        if not kept:
            write_text(plan.config_path, plan.toml)
            self.say(plan, "resumes" if plan.run_dir.exists() else "starts")
            resume = ["--resume"] if plan.run_dir.exists() else []
            if not self.execute(plan, ["train.py", str(plan.config_path), *resume]):
                return False
        if not is_evaluated(plan) and not self.execute(plan, ["-m", "eval.evaluate", str(plan.run_dir)]):
            return False
        with self.lock:
            self.done += 1
        self.say(
            plan, f"{'was finished' if kept else f'finished in {time.monotonic() - started:.0f} s'} ({self.done} of {len(self.plans)})"
        )
        return True

    def execute(self, plan: Plan, arguments: list[str]) -> bool:
        """Runs Python with `arguments`, its output appended to the run's log. Returns whether it ended well."""
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.parallel)))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        arguments = [str(ROOT / arguments[0]), *arguments[1:]] if arguments[0].endswith(".py") else arguments
        with open(plan.log_path, "ab") as log:
            with self.lock:
                if self.stopped_by:
                    return False
                # a session of its own: a terminal's Ctrl-C reaches it through `stop` alone, once
                child = subprocess.Popen(
                    [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
                )
                self.children.add(child)
            status = child.wait()
            with self.lock:
                self.children.discard(child)
        if status and not self.stopped_by:
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            self.say(plan, f"FAILED ({how}): {last_line(plan.log_path)}")
        return status == 0

    def stop(self, number: int, frame: object) -> None:
        """Asks every child to save itself; a second signal ends them at once."""
        again, self.stopped_by = bool(self.stopped_by), number
        for child in list(self.children):
            child.kill() if again else child.send_signal(signal.SIGTERM)

    def say(self, plan: Plan, what: str) -> None:
        print(f"{plan.name}: {what}", flush=True)


def is_finished(plan: Plan) -> bool:
    """Whether the run has reached its end with this very config. Raises InputError if it was taken beyond that by hand."""
    same = plan.config_path.is_file() and plan.config_path.read_text(encoding="utf-8") == plan.toml
    if not same or read_json(plan.run_dir / "run.json").get("exit_reason") != FINISHED:
        return False
    done, wanted = (load_config(path).train.max_steps for path in (plan.run_dir / "config.toml", plan.config_path))
    if done > wanted:
        raise InputError(f"{plan.run_dir} was trained for {done} steps, and the sweep is for {wanted}; move that folder away, or sweep {done} steps")
    return done == wanted


def is_evaluated(plan: Plan) -> bool:
    """Whether eval.json is as new as the run's last line."""
    evaluation, metrics = plan.run_dir / "eval.json", plan.run_dir / "metrics.jsonl"
    return evaluation.is_file() and evaluation.stat().st_mtime_ns >= metrics.stat().st_mtime_ns


def compare_runs(finished: list[Plan], baseline: str, out_dir: Path) -> None:
    """Compares what is finished. A head may differ in its own settings (learning rate, untied prototypes), all else is common."""
    reference = next((plan for plan in finished if plan.head == baseline), None)
    if reference is None:
        print(f"no run of the baseline {baseline} is finished: nothing to compare with")
        return
    comparison = compare([read_run(plan.run_dir) for plan in finished], read_run(reference.run_dir))
    write(comparison, out_dir)
    print(terminal_table(comparison))
    print(f"report: {out_dir / 'report.md'}")


def listed(text: str, flag: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError(f"{flag} is empty")
    return parts


def seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in listed(text, "--seeds")]
    except ValueError:
        raise InputError(f"--seeds {text}: whole numbers with commas between are wanted") from None


def last_line(path: Path) -> str:
    lines: Iterable[str] = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(list(lines)) if line.strip()), "no output")


if __name__ == "__main__":
    command(main)
