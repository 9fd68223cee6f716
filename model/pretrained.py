"""`model.init_from`: a model that starts from the weights of a run of ours, or of a `transformers` checkpoint, with any head."""

import tomllib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from commands import InputError
from model import BACKBONES
from model.hf import read_checkpoint
from model.hf_families import FAMILIES

SAME = ("name", "n_layer", "n_head", "n_embd", "num_key_value_heads", "intermediate_size", "bias", "rope_theta", "rms_norm_eps")


def load_pretrained(model: nn.Module, config, folder: Path) -> str:
    """Copies the weights of `config.model.init_from` into `model` (a LanguageModel built from `config`), in place.

    `folder`: where they lie, a checkpoint of a run of ours (checkpoints/step_...) or a `transformers` checkpoint.

    The backbone is copied whole: a `block_size` below the checkpoint's crops learned positions, and rows of the
    vocabulary that it does not have keep their fresh values. The head comes along if it is the same, option by option;
    otherwise it stays fresh, apart from tied prototypes. Returns what was taken, in words.
    Raises InputError naming both values where the two models differ, the block is longer than the learned positions,
    or the checkpoint has more rows.
    """
    source = config.model.init_from
    stored_model, stored_head, state = read_run(folder) if (folder / "state.json").is_file() else read_checkpoint(folder)
    family = FAMILIES[config.model.name]
    ours = {"model": vars(config.model), "stored": stored_model}
    for key in SAME:
        wanted, found = (effective(key, section) for section in ours.values())
        if wanted != found:
            raise InputError(f"model.init_from: model.{key} = {wanted}, but {source} has {found}")
    embedding, positions = f"backbone.{family.embedding}", f"backbone.{family.positions}"
    own, block_size = model.state_dict(), config.model.block_size
    if positions in state:
        if block_size > len(state[positions]):
            raise InputError(f"model.init_from: model.block_size = {block_size} is longer than the {len(state[positions])} positions of {source}")
        state[positions] = state[positions][:block_size]
    if len(state[embedding]) > len(own[embedding]):
        raise InputError(f"model.init_from: model.vocab_size = {len(own[embedding])} is below the {len(state[embedding])} rows of {source}")
    same_head = heads_agree(model.head, stored_head, config.head.name)
    if same_head and not config.model.tie_weights:
        state.setdefault("head.weight", state[embedding])  # it was tied there
    for name in ("head.weight", "head.bias", embedding):  # one row per id, and no bias for ids that are no word
        if name in state and name in own:
            state[name] = torch.cat((state[name].to(own[name]), own[name][len(state[name]) :]))[: len(own[name])]
    taken = {name: tensor for name, tensor in state.items() if name.startswith("backbone.") or (same_head and name in own)}
    if config.model.tie_weights:
        taken["head.weight"] = taken[embedding]
    misshapen = [name for name, tensor in taken.items() if name not in own or own[name].shape != tensor.shape]
    missing = [name for name in own if name.startswith("backbone.") and name not in taken]
    if misshapen or missing:
        raise InputError(f"model.init_from: {source} does not fit: {', '.join((misshapen + missing)[:4])}")
    model.load_state_dict(own | taken)
    return f"backbone{' and head' if same_head else ''} from {source}"


def effective(key: str, section: dict):
    """A [model] key with the family's default where it is unset."""
    value = section.get(key)
    if key == "num_key_value_heads":
        return value or section["n_head"]
    if key == "intermediate_size":
        return value or BACKBONES[section["name"]].default_intermediate_size(section["n_embd"])
    if key in ("rope_theta", "rms_norm_eps"):
        return value if section["name"] == "qwen2" else None
    return True if key == "bias" and value is None else value


def heads_agree(head: nn.Module, stored: dict, name: str) -> bool:
    """Whether the stored head is this one: the same distance with the same options, so that its tensors mean the same."""
    options = {key: value for key, value in head.options().items() if value is not None}
    given = {key: value for key, value in stored.items() if key != "name" and value is not None}
    return stored["name"] == name and all(options.get(key) == value for key, value in given.items())


def read_run(folder: Path) -> tuple[dict, dict, dict[str, Tensor]]:
    """([model] keys, [head] keys, state dict) of a checkpoint in a run folder. Raises InputError."""
    try:
        config = tomllib.loads((folder.parent.parent / "config.toml").read_text(encoding="utf-8"))
        return config["model"], config["head"], load_file(folder / "model.safetensors")
    except (OSError, SafetensorError, tomllib.TOMLDecodeError, KeyError) as error:
        raise InputError(f"model.init_from: cannot read {folder}: {error}") from error
