"""Opening a run, in one place: config -> the dataset's description -> backbone and head -> weights."""

import dataclasses
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from commands import InputError
from config import MAY_CHANGE_ON_RESUME, Config, differences, load_config
from config.schema import ScheduleConfig
from data.masking import Masking
from data.token_file import DatasetMeta, open_dataset
from heads import build_head
from model import build_model
from model.hf import fetch
from model.language_model import LanguageModel
from training.checkpoint import Checkpoints, load_model
from training.record import read_json

ROW_MULTIPLE = 64  # matrix products over the vocabulary are fastest on whole tiles (nanoGPT's 50,304 = 786 x 64)


@dataclass(frozen=True)
class Run:
    """A trained model as its run folder describes it, in evaluation mode."""

    config: Config
    meta: DatasetMeta
    model: LanguageModel
    directory: Path
    step: int


def open_run(directory: str | Path, checkpoint: str = "last", device: str | torch.device = "cpu") -> Run:
    """Opens a run folder at `checkpoint`: `last`, `best` or a step.

    Raises InputError if the folder is no run, the checkpoint is missing or damaged, or the weights do not fit the config.
    """
    directory = Path(directory)
    for name, what in (("config.toml", "resolved config"), ("run.json", "record")):
        if not (directory / name).is_file():
            raise InputError(f"{directory} is not a run folder: its {what} {name} is missing")
    config = load_config(directory / "config.toml", [])
    meta = read_meta(directory)
    folder, state = find_checkpoint(Checkpoints(directory), checkpoint)
    model = build(config, meta)
    load_model(model, folder / "model.safetensors")
    return Run(config, meta, model.to(device).eval(), directory, state["step"])


def find_checkpoint(checkpoints: Checkpoints, which: str) -> tuple[Path, dict]:
    """(folder, state) of `last`, `best` or a step."""
    if which == "last":
        newest = checkpoints.newest_valid()
        if newest is None:
            raise InputError(f"{checkpoints.folder}: there is no checkpoint yet")
        return newest
    if which == "best":
        best = checkpoints.best()
        if best is None:
            raise InputError(f"{checkpoints.folder}: no best checkpoint yet; use --checkpoint last")
        return checkpoints.open(best)
    if not re.fullmatch("[0-9]+", str(which)):
        raise InputError(f"--checkpoint {which}: it is last, best or a step")
    return checkpoints.open(int(which))


def resolve(config: Config, meta: DatasetMeta, schedule: ScheduleConfig | None = None) -> Config:
    """The config with every default that depends on the dataset, or on another key, replaced by its value.

    `schedule`: a resumed run's own, whose values stand where the file is silent (so that a longer `max_steps` does not bend it).
    Raises InputError if `model.vocab_size` is too small for the dataset.
    """
    mask_token_id = meta.mask_token_id if config.data.mask_token_id is None else config.data.mask_token_id
    words = max(meta.vocab_size, mask_token_id + 1)
    rows = config.model.vocab_size or -(-words // ROW_MULTIPLE) * ROW_MULTIPLE
    needed = words if config.model.name == "bert" else meta.vocab_size
    if rows < needed:
        raise InputError(f"model.vocab_size = {rows} has no row for id {needed - 1} of {config.data.dataset} ({meta.tokenizer}): use at least {needed}")
    stored = schedule or ScheduleConfig()
    decay_steps = first_set(config.schedule.decay_steps, stored.decay_steps, config.train.max_steps)
    warmup_steps = first_set(config.schedule.warmup_steps, stored.warmup_steps, decay_steps // 20)
    min_lr = first_set(config.schedule.min_lr, stored.min_lr, config.optimizer.learning_rate / 100)
    return replace(
        config,
        data=replace(config.data, mask_token_id=mask_token_id),
        model=replace(config.model, vocab_size=rows),
        schedule=ScheduleConfig(decay_steps=decay_steps, warmup_steps=warmup_steps, min_lr=min_lr),
        eval=replace(config.eval, batch_size=first_set(config.eval.batch_size, config.train.batch_size)),
    )


def resolve_if_prepared(config: Config) -> Config:
    """`resolve`, and the head's options, where the dataset is there to resolve them with; else the config as it is."""
    if not (Path(config.data.dataset) / "train.bin").exists():
        return config
    meta = open_dataset(config.data.dataset).meta
    config = resolve(config, meta)
    with torch.device("meta"):  # no memory: only the head's choice of values is wanted
        return record_head(config, build_vocabulary_head(config, meta))


def check_resume(config: Config, stored: Config, sequences_per_step: tuple[int | None, int]) -> None:
    """Raises InputError, naming the keys, if `config` would continue another run than `stored`.

    `sequences_per_step`: the global batch size that was (None: the run was imported), and that would be.
    """
    if sequences_per_step[0] is None:
        raise InputError(f"--resume: {stored.out_dir} was imported, not trained; train from it with --model.init_from={stored.out_dir}")
    changed = [key for key in differences(stored, config) if key not in MAY_CHANGE_ON_RESUME]
    renamed = [key.removesuffix("name") for key in changed if key.endswith(".name")]  # another head or model: its options need no mention
    changed = [key for key in changed if key.endswith(".name") or not key.startswith(tuple(renamed))]
    if changed:
        raise InputError(f"--resume: {', '.join(changed)} differ from {stored.out_dir}/config.toml; restore them, or start another run with --out_dir")
    if sequences_per_step[0] != sequences_per_step[1]:
        raise InputError(
            f"--resume: train.batch_size x train.gradient_accumulation_steps x processes was {sequences_per_step[0]} and is now "
            f"{sequences_per_step[1]}; keep the product"
        )


def check_dataset(run_dir: Path, meta: DatasetMeta) -> None:
    """Raises InputError if the dataset is not the one that the run in `run_dir` was trained on."""
    stored = read_meta(run_dir)
    changed = [name for name in ("checksum", "tokenizer", "vocab_size", "train_tokens", "val_tokens") if getattr(stored, name) != getattr(meta, name)]
    if changed:
        raise InputError(f"--resume: the dataset is not the one this run was trained on ({', '.join(changed)} differ from {run_dir}/run.json)")


def pretrained_folder(config: Config, meta: DatasetMeta | None = None) -> Path:
    """Where the weights of `model.init_from` lie: the newest checkpoint of a run of ours, or a `transformers` checkpoint.

    Raises InputError if there is neither, or the run's ids mean other words than the dataset's (`meta`).
    """
    source = Path(config.model.init_from)
    if not (source / "config.toml").is_file():
        return fetch(config.model.init_from)
    newest = Checkpoints(source).newest_valid()
    if newest is None:
        raise InputError(f"model.init_from: {source} has no checkpoint yet")
    if meta is not None and (source / "run.json").is_file():
        stored = read_meta(source)
        if (stored.tokenizer, stored.vocab_size) != (meta.tokenizer, meta.vocab_size):
            raise InputError(
                f"model.init_from: {source} was trained on ids of {stored.tokenizer} ({stored.vocab_size}), and {config.data.dataset} holds "
                f"ids of {meta.tokenizer} ({meta.vocab_size})"
            )
    return newest[0]


def read_meta(run_dir: Path) -> DatasetMeta:
    """The dataset's description as the run recorded it. Raises InputError if run.json does not hold it."""
    path = run_dir / "run.json"
    try:
        return DatasetMeta.from_dict(read_json(path)["dataset"])
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged or no run's record ({type(error).__name__}: {error})") from error


def first_set(*values):
    return next(value for value in values if value is not None)


def build(config: Config, meta: DatasetMeta) -> LanguageModel:
    """Backbone and head of a resolved config, joined; initialised from torch's default generator.

    Raises InputError for a shape, a head or an option that cannot be.
    """
    try:
        backbone = build_model(config.model)
        head = build_vocabulary_head(config, meta)
        backbone.activation_checkpointing = config.train.activation_checkpointing
        return LanguageModel(backbone, head, config.model.tie_weights)
    except InputError:
        raise
    except (ValueError, OverflowError, MemoryError, RuntimeError) as error:  # the last: torch has no room for it, or no number
        raise InputError(f"this model cannot be built: {str(error).splitlines()[0][:300] if str(error) else 'no memory'}") from error


def build_vocabulary_head(config: Config, meta: DatasetMeta) -> nn.Module:
    options = dataclasses.asdict(config.head)
    return build_head(
        options.pop("name"), n_embd=config.model.n_embd, vocab_size=meta.vocab_size, padded_vocab_size=config.model.vocab_size, **options
    )


def record_head(config: Config, head: nn.Module) -> Config:
    """The config with the values that the head uses for every option that was left to it.

    Raises InputError for an option of the head that no config could hold.
    """
    unknown = head.options().keys() - {field.name for field in dataclasses.fields(config.head)}
    if unknown:
        raise InputError(f"head {config.head.name}: its option {', '.join(sorted(unknown))} is no key of HeadConfig in config/schema.py; add it there")
    return replace(config, head=replace(config.head, **head.options()))


def masking(config: Config, meta: DatasetMeta, model: LanguageModel) -> Masking | None:
    """The masked-LM rule of a bidirectional backbone; None for a causal one."""
    if model.backbone.causal:
        return None
    return Masking.for_dataset(meta, config.data.mask_fraction, config.data.mask_token_id)
