"""Checkpoints of `transformers`: read into ours, and ours written so that `transformers` opens them. It need not be installed.

    python -m model.hf import NAME_OR_DIR RUN      a run folder from a GPT-2, BERT or Qwen2 checkpoint (a hub name, or a folder)
    python -m model.hf export RUN DIR              config.json, model.safetensors, README.md

With the linear head the export is a complete language model. Any other head does not exist there: the export is then the
backbone, with the head (and BERT's masked-LM transform) beside it in head.safetensors and head.json, and README.md joins the two.
"""

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from commands import InputError, Parser, command
from model import BACKBONES
from model.hf_families import BERT_UNTIED_BIAS, FAMILIES, Family, family_of
from model.hf_readme import HEAD_README, LANGUAGE_MODEL_README, TRANSFORM_LINES

SOFTMAX_HEAD = "linear"  # the one head that `transformers` has
NEVER = -1e4  # the logit of a row that is no word: its probability is exactly 0 in float32, and it stays finite in float16
HUB_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json", "head.json")
NO_DATASET = "none"  # data.dataset of an imported run: name one to train or evaluate it
GPT2_WORDS = 50257  # OpenAI's vocabulary, whose last id ends a text
BERT_MASK = 103  # [MASK] in the released vocabularies


def fetch(name_or_dir: str) -> Path:
    """The folder of a checkpoint: a local one as it is, a name from the Hugging Face hub. Raises InputError if there is neither."""
    if Path(name_or_dir).is_dir():
        return Path(name_or_dir)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name_or_dir, allow_patterns=HUB_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"{name_or_dir} is no folder, and cannot be had from the Hugging Face hub ({reason})") from error


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error


def refuse_used(folder: Path) -> None:
    """Raises InputError unless `folder` is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: choose another folder")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, or of the files that model.safetensors.index.json lists. Raises InputError."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif index.is_file():
        files = sorted(set(read_json(index)["weight_map"].values()))
    else:
        raise InputError(f"{folder} holds no model.safetensors (files of pickled tensors are not read: save it with safe_serialization)")
    tensors = {}
    for name in files:
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {folder / name}: {error}") from error
    return tensors


def read_checkpoint(folder: Path) -> tuple[dict, dict, dict[str, Tensor]]:
    """(our [model] keys, our [head] keys, our state dict) of a `transformers` folder, or of an export of ours with its head.

    The state dict has `backbone.` and `head.` prefixes; a tied head's `weight` is not in it. Raises InputError.
    """
    config = read_json(folder / "config.json")
    family = FAMILIES[family_of(config)]
    model = {"name": config["model_type"], **family.read(config)}
    tensors = read_tensors(folder)
    if (folder / "head.json").is_file():
        about, beside = read_json(folder / "head.json"), load_file(folder / "head.safetensors")
        tensors |= {family.their_name(name): tensor for name, tensor in beside.items() if name.startswith("transform.")}
        head = {"name": about["name"], **about["options"]}
        head_state = {name.removeprefix("head."): tensor for name, tensor in beside.items() if name.startswith("head.")}
        model["tie_weights"] = about["tie_weights"]
    else:
        head_state = {ours: tensors[theirs].float() for ours, theirs in family.head.items() if theirs in tensors}
        if BERT_UNTIED_BIAS in tensors and not model["tie_weights"]:
            head_state["bias"] = tensors[BERT_UNTIED_BIAS].float()
        head = {"name": SOFTMAX_HEAD, "bias": "bias" in family.head}
    if model["tie_weights"]:
        head_state.pop("weight", None)
    elif "weight" not in head_state:
        raise InputError(f"the checkpoint lacks {family.head['weight']}, and its config.json says that it is not tied")
    backbone = family.take(tensors, backbone_shapes(model))
    state = {f"backbone.{name}": tensor for name, tensor in backbone.items()} | {f"head.{name}": tensor for name, tensor in head_state.items()}
    return model, head, state


def backbone_shapes(model: dict) -> dict[str, Tensor]:
    """The state dict, without storage, of the backbone that [model] keys describe."""
    section = argparse.Namespace(**{"intermediate_size": None, "num_key_value_heads": None, "bias": True, **model})
    with torch.device("meta"):
        return BACKBONES[section.name](section).state_dict()


def write_checkpoint(run, folder: Path) -> str:
    """Writes config.json, model.safetensors, README.md (and, for a head that `transformers` does not have, head.json and
    head.safetensors) into `folder`, which is created whole or not at all. Returns what was written, in words.

    `run`: has `config` (`model`, `head`), `meta` (`vocab_size`, `eot_id`, `mask_token_id`) and `model` (a LanguageModel).
    Raises InputError if the folder exists and is not empty.
    """
    folder = folder.resolve()
    refuse_used(folder)
    family, section = FAMILIES[run.config.model.name], run.config.model
    complete = run.config.head.name == SOFTMAX_HEAD and run.model.head.state_dict().keys() <= family.head.keys()
    config = {
        "model_type": section.name,
        **family.write(section, section.intermediate_size or BACKBONES[section.name].default_intermediate_size(section.n_embd)),
        "vocab_size": run.model.backbone.token_embedding.num_embeddings,
        "bos_token_id": run.meta.eot_id, "eos_token_id": run.meta.eot_id,
        "dtype": "float32",
        "target_vocab_size": run.meta.vocab_size, "tokenizer_name": run.meta.tokenizer,  # keys of ours, for the way back
    }  # fmt: skip
    if not run.model.backbone.causal:
        mask_token_id = run.config.data.mask_token_id
        config["mask_token_id"] = run.meta.mask_token_id if mask_token_id is None else mask_token_id
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if complete:
            what = write_language_model(run, family, config, temporary)
        else:
            what = write_backbone_and_head(run, family, config, temporary)
        if folder.exists():
            folder.rmdir()  # empty, and os.replace wants the name free
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return what


def write_language_model(run, family: Family, config: dict, folder: Path) -> str:
    """A complete language model. A causal one ends at the last word, so that padded rows have no probability there either;
    BERT reads its mask from those rows, and its decoder's bias takes them out of the softmax."""
    config |= {"architectures": [family.language_model_class], "tie_word_embeddings": run.config.model.tie_weights}
    backbone, head = run.model.backbone.state_dict(), run.model.head.state_dict()
    words = run.meta.vocab_size
    if "bias" in family.head:
        bias = torch.full((config["vocab_size"],), NEVER)
        bias[:words] = head["bias"] if "bias" in head else 0.0
        head["bias"] = bias
    else:
        config["vocab_size"] = words
        backbone[family.embedding], head["weight"] = backbone[family.embedding][:words], head["weight"][:words]
    if run.config.model.tie_weights:
        del head["weight"]
    tensors = family.give(backbone) | {family.head[name]: tensor.float().contiguous() for name, tensor in head.items()}
    if "bias" in family.head:
        tensors[BERT_UNTIED_BIAS] = head["bias"].clone()
    write_folder(folder, config, tensors, LANGUAGE_MODEL_README.format(auto="ForCausalLM" if run.model.backbone.causal else "ForMaskedLM"))
    return f"{family.language_model_class} with its softmax head"


def write_backbone_and_head(run, family: Family, config: dict, folder: Path) -> str:
    """The backbone alone, declared untied so that nothing there can take its embedding for a softmax head; the head beside it."""
    config |= {"architectures": [family.backbone_class], "tie_word_embeddings": False}
    tensors = family.give(run.model.backbone.state_dict())
    inside = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items() if name.startswith(family.prefix)}
    beside = {f"head.{name}": tensor.clone().contiguous() for name, tensor in run.model.head.state_dict().items()}
    beside |= {name: tensor.clone() for name, tensor in run.model.backbone.state_dict().items() if name.startswith("transform.")}
    about = {
        "name": run.config.head.name, "n_embd": run.config.model.n_embd, "vocab_size": run.meta.vocab_size,
        "padded_vocab_size": config["vocab_size"], "tie_weights": run.config.model.tie_weights,
        "options": {name: value for name, value in run.model.head.options().items() if value is not None},
    }  # fmt: skip
    has_transform = any(name.startswith("transform.") for name in beside)
    write_folder(folder, config, inside, HEAD_README.format(head=about["name"], transform=TRANSFORM_LINES if has_transform else ""))
    (folder / "head.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    save_file(beside, folder / "head.safetensors", metadata={"format": "pt"})
    return f"{family.backbone_class}, and beside it the {about['name']} head (README.md joins the two)"


def write_folder(folder: Path, config: dict, tensors: dict[str, Tensor], readme: str) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(readme, encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def import_run(name_or_dir: str, directory: Path, tokenizer_name: str | None = None) -> str:
    """Writes a run folder at step 0 with the weights of a `transformers` checkpoint. Returns what was written, in words.

    `tokenizer_name`: as in `python -m data.prepare` (default: the checkpoint's tokenizer.json, if it has one).
    Raises InputError, with nothing written, if the checkpoint is none of ours to read or the folder is not empty.
    """
    from config import Config, to_toml
    from config.schema import DataConfig, HeadConfig, ModelConfig
    from runs import build, record_head, resolve
    from training.checkpoint import Checkpoints, write_text
    from training.record import describe_machine, now, strict_json

    refuse_used(directory)
    folder = fetch(name_or_dir)
    model_keys, head_keys, state = read_checkpoint(folder)
    meta = describe_vocabulary(folder, model_keys, tokenizer_name)
    config = Config(
        data=DataConfig(dataset=NO_DATASET, mask_token_id=meta.mask_token_id if model_keys["name"] == "bert" else None),
        model=ModelConfig(**model_keys),
        head=HeadConfig(**head_keys),
        out_dir=str(directory),
    )
    config = resolve(config, meta)
    model = build(config, meta)
    load_state(model, state, config.model.tie_weights)
    about = {**describe_machine(), "dataset": dataclasses.asdict(meta), "imported_from": str(name_or_dir), "started": now(), "ended": now()}
    directory.mkdir(parents=True, exist_ok=True)
    Checkpoints(directory).save(model, {}, {"step": 0, "best_step": None})
    write_text(directory / "config.toml", to_toml(record_head(config, model.head)))
    write_text(directory / "run.json", strict_json({**about, "exit_reason": "imported"}, indent=2) + "\n")
    return f"{config.model.name} with {sum(parameter.numel() for parameter in model.parameters()):,} parameters and the {config.head.name} head"


def load_state(model: torch.nn.Module, state: dict[str, Tensor], tied: bool) -> None:
    """Copies `state` into a LanguageModel: every tensor, of the same shape. Raises InputError naming what does not fit."""
    own = model.state_dict()
    if tied:  # one tensor under two names
        embedding = next(name for name, tensor in own.items() if tensor.data_ptr() == own["head.weight"].data_ptr())
        state = state | {"head.weight": state[embedding]}
    if "head.bias" in own and "head.bias" in state:
        state = state | {"head.bias": state["head.bias"][: len(own["head.bias"])]}  # rows that are no word have no bias here
    differing = sorted(own.keys() ^ state.keys()) + [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
    if differing:
        raise InputError(f"the checkpoint does not fit its own description: {', '.join(differing[:4])}")
    model.load_state_dict(state)


def describe_vocabulary(folder: Path, model_keys: dict, tokenizer_name: str | None):
    """The DatasetMeta of a checkpoint that came without a dataset: which ids are words, and what they mean."""
    from data.token_file import DatasetMeta
    from data.tokenizers import load_tokenizer

    config, rows = read_json(folder / "config.json"), model_keys["vocab_size"]
    if tokenizer_name is None and (folder / "tokenizer.json").is_file():
        tokenizer_name = str((folder / "tokenizer.json").resolve())
    eot_id = config.get("eos_token_id") if isinstance(config.get("eos_token_id"), int) else None
    words, mask_token_id = config.get("target_vocab_size", rows), config.get("mask_token_id")
    if tokenizer_name is not None:
        tokenizer = load_tokenizer(tokenizer_name)
        if tokenizer.vocab_size > rows:
            raise InputError(f"tokenizer {tokenizer_name} has {tokenizer.vocab_size} ids, the checkpoint {rows} rows: it is not its tokenizer")
        words, eot_id = min(words, tokenizer.vocab_size), tokenizer.eot_id
        mask_token_id = tokenizer.mask_token_id if mask_token_id is None else mask_token_id
    elif "tokenizer_name" in config:  # an export of ours, whose vocabulary is described beside it
        tokenizer_name = config["tokenizer_name"]
    elif model_keys["name"] == "gpt2" and words == GPT2_WORDS:
        tokenizer_name, eot_id = "gpt2", GPT2_WORDS - 1
    if mask_token_id is None:
        mask_token_id = min(BERT_MASK, words - 1) if model_keys["name"] == "bert" else words
    return DatasetMeta(
        dtype="uint16" if words <= 1 << 16 else "uint32", vocab_size=words, max_id=words - 1, train_tokens=0, val_tokens=0,
        mask_token_id=mask_token_id, tokenizer=tokenizer_name, eot_id=eot_id if eot_id is not None and eot_id < words else None,
        source=f"imported from {folder}",
    )  # fmt: skip


def export_run(directory: str, folder: Path, checkpoint: str) -> str:
    """Opens a run and writes it for `transformers`, with its tokenizer.json if it has one. Returns what was written, in words."""
    from runs import open_run

    run = open_run(directory, checkpoint)
    what = write_checkpoint(run, folder)
    if run.meta.tokenizer and run.meta.tokenizer.endswith(".json") and Path(run.meta.tokenizer).is_file():
        shutil.copyfile(run.meta.tokenizer, folder / "tokenizer.json")
    return f"{what}, step {run.step}"


def main(argv: list[str]) -> None:
    parser = Parser(prog="python -m model.hf", description="Exchange checkpoints with transformers (GPT-2, BERT, Qwen2).")
    actions = parser.add_subparsers(dest="action", required=True)
    reading = actions.add_parser("import", help="make a run folder from a transformers checkpoint")
    reading.add_argument("source", metavar="NAME_OR_DIR", help="a folder with config.json and model.safetensors, or a name on the Hugging Face hub")
    reading.add_argument("run", metavar="RUN", type=Path, help="the run folder to make")
    reading.add_argument("--tokenizer", metavar="NAME", help="bytes, a tiktoken encoding or a tokenizer.json (default: the checkpoint's own)")
    writing = actions.add_parser("export", help="write a run so that transformers opens it")
    writing.add_argument("run", metavar="RUN", help="a run folder")
    writing.add_argument("folder", metavar="DIR", type=Path, help="the folder to make")
    writing.add_argument("--checkpoint", metavar="last|best|STEP", default="last", help="which checkpoint (default: last)")
    asked = parser.parse_args(argv)
    if asked.action == "import":
        print(f"{asked.run}: {import_run(asked.source, asked.run, asked.tokenizer)}")
    else:
        print(f"{asked.folder}: {export_run(asked.run, asked.folder, asked.checkpoint)}")


if __name__ == "__main__":
    command(main)
