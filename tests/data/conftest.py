"""Fixtures of the data room: tokenizers that need no network, and small dataset folders."""

import json
from pathlib import Path

import numpy as np
import pytest

from commands import InputError
from data.tokenizers import load_tokenizer
from data.writer import DatasetWriter


@pytest.fixture(scope="session")
def gpt2():
    """tiktoken's GPT-2 encoding."""
    try:
        return load_tokenizer("gpt2")
    except InputError as error:
        pytest.skip(f"GPT-2's vocabulary is neither cached nor in reach: {error}")


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory) -> Path:
    """A byte-level BPE of 400 ids with an end-of-text and a mask token, as Hugging Face writes it."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package `tokenizers` is not installed")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "[MASK]"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog, and the dog sleeps on " * 20], trainer)
    bpe.save(str(path))
    return path


@pytest.fixture
def write_dataset(tmp_path):
    """write_dataset(train ids, val ids, vocab_size=..., ...) -> the folder."""

    def write(train, val, dtype="uint16", name="dataset", vocab_size=1000, **facts) -> Path:
        with DatasetWriter(tmp_path / name, dtype) as writer:
            writer.append("train", np.asarray(train, dtype=dtype))
            writer.append("val", np.asarray(val, dtype=dtype))
            writer.publish(vocab_size=vocab_size, mask_token_id=vocab_size, **facts)
        return tmp_path / name

    return write


@pytest.fixture
def edit_meta():
    """edit_meta(folder, key=value, ...): changes entries of meta.json; None removes one."""

    def edit(folder: Path, **changes) -> None:
        path = folder / "meta.json"
        meta = {**json.loads(path.read_text(encoding="utf-8")), **changes}
        path.write_text(json.dumps({key: value for key, value in meta.items() if value is not None}), encoding="utf-8")

    return edit


@pytest.fixture
def jsonl(tmp_path):
    """jsonl("name.jsonl", text, text, ...) -> the path of a file with these documents."""

    def write(name: str, *texts) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return path

    return write
