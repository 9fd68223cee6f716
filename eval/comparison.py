"""Runs put into groups of seeds and held against a baseline: who may be compared with whom, and what comes out."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from commands import InputError
from eval.run_folder import RunFolder
from eval.run_metrics import METRICS, Terms, measure
from eval.statistics import Difference, Summary, paired_difference, summarize

NOT_IN_THE_BACKBONE = ("name", "tie_weights")  # the family is compared as such; untied prototypes are the head's affair
TRAINING = ("max_steps", "grad_clip", "precision", "label_smoothing")  # of [train]: what changes the sequence of updates
BY_DEFAULT = Terms()
OBJECTIVE = ("mask_fraction", "mask_token_id")  # of [data]


@dataclass
class Group:
    """The runs of one (family, head, options) over seeds. `values[metric][seed]`."""

    family: str
    head: str
    options: tuple[tuple[str, object], ...]
    learning_rate: float
    runs: dict[int, RunFolder]
    label: str = ""
    baseline: "Group | None" = None
    values: dict[str, dict[int, float | None]] = field(default_factory=dict)
    whole: bool = False  # as in Terms

    @property
    def is_baseline(self) -> bool:
        return self.baseline is self

    @property
    def masked(self) -> bool:
        return any(run.masked for run in self.runs.values())

    def summary(self, metric: str) -> Summary:
        return summarize(list(self.values[metric].values()))

    def difference(self, metric: str) -> Difference | None:
        """To the baseline, paired by seed; None for the baseline itself and where there is none."""
        if self.baseline is None or self.is_baseline:
            return None
        seeds = [seed for seed in self.runs if seed in self.baseline.runs and self._equal_n(metric, seed)]
        return paired_difference([self.values[metric][seed] for seed in seeds], [self.baseline.values[metric][seed] for seed in seeds])

    def _equal_n(self, metric: str, seed: int) -> bool:
        """Spectra of different numbers of vectors cannot be subtracted."""
        count = METRICS[metric].counted_by
        if count is None:
            return True
        mine, theirs = (group.runs[seed].results(self.whole).get(count) for group in (self, self.baseline))
        return mine == theirs


@dataclass
class Comparison:
    """Groups in the order of their runs, each family's baseline first; `notes` is what a reader has to know beside the numbers."""

    groups: list[Group]
    notes: list[str]
    terms: Terms

    @cached_property
    def families(self) -> dict[str, list[Group]]:
        families: dict[str, list[Group]] = {}
        for group in self.groups:
            families.setdefault(group.family, []).append(group)
        return families

    def metrics(self) -> list[str]:
        """The metrics that at least one run has."""
        return [key for key in METRICS if any(value is not None for group in self.groups for value in group.values[key].values())]


def compare(runs: list[RunFolder], baseline: RunFolder, terms: Terms = BY_DEFAULT, force: bool = False) -> Comparison:
    """Groups `runs` (the baseline's among them or not) and measures each against its family's baseline.

    The baseline of a family is the group with the head and options of `baseline`. Raises InputError, naming the keys, when a run
    differs from its baseline in backbone, data, order, schedule or tokens; `force` turns that into notes.
    """
    if all(run.directory.resolve() != baseline.directory.resolve() for run in runs):
        runs = [baseline, *runs]
    groups = group_runs(runs)
    assign_baselines(groups, baseline)
    differing = [text for group in groups for text in incomparable(group)]
    if differing and not force:
        raise InputError("not comparable: " + "; ".join(differing) + " (--force compares them all the same)")
    name_groups(groups)
    terms = replace(terms, whole=all(run.evaluated_whole for group in groups for run in group.runs.values()))
    for group in groups:
        group.whole = terms.whole
        paired = group.baseline.runs if group.baseline else {}
        measured = {seed: measure(run, paired.get(seed), terms) for seed, run in group.runs.items()}
        group.values = {key: {seed: values[key] for seed, values in measured.items()} for key in METRICS}
    order = list(dict.fromkeys(group.family for group in groups))
    groups.sort(key=lambda group: (order.index(group.family), not group.is_baseline))
    return Comparison(groups, [f"compared all the same: {text}" for text in differing] + remarks(groups, terms), terms)


def group_runs(runs: list[RunFolder]) -> list[Group]:
    groups: dict[tuple, Group] = {}
    for run in runs:
        key = (run.family, run.head, run.options, run.learning_rate)
        group = groups.setdefault(key, Group(*key, runs={}))
        earlier = group.runs.get(run.seed)
        if earlier and earlier.directory.resolve() != run.directory.resolve():
            raise InputError(f"{earlier.directory} and {run.directory} are the same head with the same seed: name one of them")
        group.runs[run.seed] = run
    for group in groups.values():
        group.runs = dict(sorted(group.runs.items()))
    return list(groups.values())


def assign_baselines(groups: list[Group], baseline: RunFolder) -> None:
    """The baseline's own group for its family; elsewhere the group of the same head, preferably with the same options."""
    wanted = (baseline.options, baseline.learning_rate)
    for family in {group.family for group in groups}:
        same_head = [group for group in groups if group.family == family and group.head == baseline.head]
        exact = [group for group in same_head if (group.options, group.learning_rate) == wanted]
        chosen = exact[0] if exact else same_head[0] if len(same_head) == 1 else None
        for group in groups:
            if group.family == family:
                group.baseline = chosen


def incomparable(group: Group) -> list[str]:
    """One text per run that differs from its family's baseline in more than its head, with the keys and both values."""
    if group.baseline is None:
        return []
    texts = []
    reference = next(iter(group.baseline.runs.values()))
    if not group.is_baseline and not group.runs.keys() & group.baseline.runs.keys():
        seeds, others = (", ".join(map(str, one.runs)) for one in (group, group.baseline))
        texts.append(f"{names(group)} and {names(group.baseline)} have no seed in common, so another data order (seed: {seeds} / {others})")
    for run in group.runs.values():
        mine, theirs = identity(run), identity(reference)
        keys = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
        if keys:
            pairs = ", ".join(f"{key}: {mine.get(key, 'unset')} / {theirs.get(key, 'unset')}" for key in keys)
            texts.append(f"{run.directory} differs from {reference.directory} ({pairs})")
    return texts


def identity(run: RunFolder) -> dict[str, object]:
    """What two runs must share to be compared: backbone, data and their order, schedule's shape, tokens. Seeds are paired elsewhere."""
    config = run.config
    train, optimizer, schedule = config["train"], config["optimizer"], config["schedule"]
    kept = {f"model.{key}": value for key, value in config["model"].items() if key not in NOT_IN_THE_BACKBONE}
    kept |= {f"optimizer.{key}": value for key, value in optimizer.items() if key != "learning_rate"}
    kept |= {f"schedule.{key}": value for key, value in schedule.items() if key != "min_lr"}
    kept |= {f"train.{key}": train[key] for key in TRAINING if key in train}
    kept["eval.tokens"] = config.get("eval", {}).get("tokens")
    if run.masked:
        kept |= {f"data.{key}": config["data"][key] for key in OBJECTIVE if key in config["data"]}
    peak = optimizer.get("learning_rate")
    if peak and "min_lr" in schedule:
        kept["schedule.min_lr / optimizer.learning_rate"] = float(f"{schedule['min_lr'] / peak:.6g}")
    rows = train.get("batch_size", 1) * train.get("gradient_accumulation_steps", 1) * run.about.get("world_size", 1)
    kept["sequences per step"] = rows
    dataset = run.about.get("dataset") or {}
    kept["data"] = dataset.get("checksum") or config["data"].get("dataset")
    return kept


def name_groups(groups: list[Group]) -> None:
    """Labels: the head's name, and as few of its options as tell it from the other groups of that name."""
    for group in groups:
        namesakes = [other for other in groups if (other.family, other.head) == (group.family, group.head)]
        options = {id(other): dict(other.options) | {"lr": other.learning_rate} for other in namesakes}
        keys = sorted(
            {key for one in options.values() for key in one}, key=lambda key: (any(key not in one for one in options.values()), key)
        )
        chosen: list[str] = []
        for key in keys:  # those that all of them have come first
            if len(distinct(options, [*chosen, key])) > len(distinct(options, chosen)):
                chosen.append(key)
        mine = options[id(group)]
        parts = [described(key, mine[key]) for key in chosen if key in mine]
        group.label = group.head + (f" ({', '.join(parts)})" if parts else "")


def distinct(options: dict[int, dict], keys: list[str]) -> set[tuple]:
    return {tuple(repr(one.get(key)) for key in keys) for one in options.values()}


def described(key: str, value: object) -> str:
    return key if value is True else f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"


def remarks(groups: list[Group], terms: Terms) -> list[str]:
    notes = []
    runs = [run for group in groups for run in group.runs.values()]
    if not terms.whole:
        notes.append("final figures are the runs' own evaluations, on the first eval.tokens of val; they are those on all of val, and bits per "
                     "byte is among them, once every run is finished and evaluated (python -m eval.evaluate RUN)")
    if len({run.masked for run in runs}) > 1:
        notes.append("masked-LM perplexities are pseudo-perplexities of masked positions; they do not compare with causal ones")
    if len({repr([(run.about.get("hardware") or {}).get(key) for key in ("cpu", "gpus")]) for run in runs}) > 1:
        notes.append("the runs were made on different machines: speeds, energy and emissions do not compare")
    rows = [row for run in runs for row in run.emissions if row.get("method")]
    for how in sorted({f"{row['method']}; electricity of: {row.get('country')}" for row in rows}):
        notes.append(f"energy and emissions by CodeCarbon: {how}")
    for label, flag, key in (
        ("PCA5, PCA@90 and PC2 EV rest", "pca_few", "n_pca"),
        ("effective rank rests", "effective_rank_few", "n_effective_rank"),
    ):
        few = sorted({figures.get(key) or 0 for figures in (run.results(terms.whole) for run in runs) if figures.get(flag)})
        if few:
            notes.append(f"{label} on {' or '.join(f'{n:,}' for n in few)} hidden states, fewer than 10 per dimension: few")
    for group in groups:
        if group.baseline is None:
            notes.append(f"{names(group)}: the family has no group with the baseline's head, so there are no differences")
        elif not group.is_baseline:
            alone = sorted(group.runs.keys() - group.baseline.runs.keys())
            if alone:
                notes.append(f"{names(group)}: seed {', '.join(map(str, alone))} has no baseline run and is in no difference")
            if group.learning_rate != group.baseline.learning_rate:
                rates = f"{group.learning_rate:g} (the baseline's: {group.baseline.learning_rate:g})"
                notes.append(f"{names(group)} has its own learning rate, {rates}: gradient stability is left blank")
        notes += [text for run in group.runs.values() for text in run_remarks(run)]
    return notes


def run_remarks(run: RunFolder) -> list[str]:
    notes = []
    if not run.metrics.eval:
        notes.append(f"{run.directory}: no evaluation")
    elif not run.final:
        reason = f" ({run.about['exit_reason']})" if run.about.get("exit_reason") else ""
        last = run.metrics.train[-1]["step"] if run.metrics.train else run.metrics.eval[-1]["step"]
        notes.append(f"{run.directory}: ended at step {last} of {run.max_steps}{reason}, so it has no final values")
    elif not run.evaluated_whole:
        notes.append(f"{run.directory}: not evaluated on all of its val after the last step, so the pictures of hidden states lack it; "
                     f"python -m eval.evaluate {run.directory} fills them in")
    if run.metrics.unreadable:
        notes.append(f"{run.directory}: {run.metrics.unreadable} line(s) of metrics.jsonl are cut and were left out")
    return notes


def names(group: Group) -> str:
    return f"{group.family} {group.label or group.head}"
