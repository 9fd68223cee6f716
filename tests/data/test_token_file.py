import dataclasses
import json
import os
import pickle

import numpy as np
import psutil
import pytest

from commands import InputError
from data.token_file import DatasetMeta, TokenFile, open_dataset, read_pickle


def test_ids_come_back_as_they_were_written(write_dataset):
    ids = np.random.default_rng(0).integers(0, 1000, 5000)
    dataset = open_dataset(write_dataset(ids, ids[:100]))
    assert len(dataset.train) == 5000 and len(dataset.val) == 100
    for window in (slice(None), slice(10, 20), slice(4990, None), slice(4990, 6000), slice(7, 7), slice(-5, None), slice(0, 50, 7)):
        assert np.array_equal(dataset.train[window], ids[window])
    assert dataset.train[3:5].dtype == np.int64
    assert np.array_equal(dataset.train.rows([0, 4000], 3), [ids[:3], ids[4000:4003]])


def test_wide_ids_survive(write_dataset):
    folder = write_dataset([1, 70_000, 151_935], [2, 65_536], dtype="uint32", vocab_size=151_936)
    assert open_dataset(folder).train[:].tolist() == [1, 70_000, 151_935]
    assert (folder / "train.bin").stat().st_size == 12


def test_an_empty_split_can_be_opened(write_dataset):
    dataset = open_dataset(write_dataset([1, 2, 3], []))
    assert len(dataset.val) == 0 and dataset.val[:].shape == (0,)


def test_meta_survives_json(write_dataset):
    meta = open_dataset(write_dataset([1], [2], eot_id=999, special_ids=(999,), source="here")).meta
    assert DatasetMeta.from_dict(json.loads(json.dumps(dataclasses.asdict(meta)))) == meta


# Damage: each is one line that names the file and says what to do


def damage_missing(folder):
    (folder / "val.bin").unlink()


def damage_lfs(folder):
    (folder / "train.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")


def damage_truncated(folder):
    os.truncate(folder / "train.bin", 100)


def damage_odd(folder):
    os.truncate(folder / "train.bin", 101)


def damage_id(folder):
    np.full(500, 1000, dtype="<u2").tofile(folder / "train.bin")


def damage_json(folder):
    (folder / "meta.json").write_text('{"dtype": ')


def damage_list(folder):
    (folder / "meta.json").write_text("[]")


@pytest.mark.parametrize(
    "damage, words",
    [
        (damage_missing, ["val.bin is missing", "python -m data.prepare"]),
        (damage_lfs, ["train.bin", "Git LFS pointer", "git lfs pull"]),
        (damage_truncated, ["train.bin holds 50 tokens where meta.json says 500", "truncated"]),
        (damage_odd, ["train.bin has 101 bytes", "uint16"]),
        (damage_id, ["id 1000", "vocabulary of 1000"]),
        (damage_json, ["meta.json", "line 1"]),
        (damage_list, ["meta.json", "not a JSON object"]),
    ],
)
def test_damage_is_an_input_error(write_dataset, damage, words):
    folder = write_dataset(np.arange(500), np.arange(50))
    open_dataset(folder)
    damage(folder)
    with pytest.raises(InputError) as error:
        open_dataset(folder)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"vocab_size": None}, "`vocab_size` is missing"),
        ({"vocab_size": "many"}, "`vocab_size` must be a whole number"),
        ({"dtype": "float32"}, "uint16, uint32, not 'float32'"),
        ({"dtype": "uint32"}, "train.bin holds 250 tokens"),
        ({"vocab_size": 400}, "id 499, outside its vocabulary of 400"),
        ({"max_id": 4000}, "id 4000, outside"),
    ],
)
def test_a_meta_that_cannot_be_is_an_input_error(write_dataset, edit_meta, changes, words):
    folder = write_dataset(np.arange(500), np.arange(50))
    edit_meta(folder, **changes)
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        open_dataset(folder)


def test_a_missing_folder_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(InputError, match=f"python -m data.prepare SOURCE --tokenizer NAME --out {tmp_path}/none"):
        open_dataset(tmp_path / "none")


def test_a_file_that_shrinks_while_it_is_read_is_an_input_error(write_dataset):
    dataset = open_dataset(write_dataset(np.arange(500), np.arange(50)))
    os.truncate(dataset.train.path, 400)
    with pytest.raises(InputError, match="has shrunk: 200 tokens where 500 were"):
        dataset.train.rows([190], 20)


def test_an_id_that_appears_later_is_an_input_error(write_dataset):
    dataset = open_dataset(write_dataset(np.arange(500), np.arange(50)))
    damage_id(dataset.folder)
    with pytest.raises(InputError, match="id 1000, outside its vocabulary of 1000"):
        dataset.train.rows([0], 20)


def test_reading_a_gigabyte_keeps_no_private_memory_and_no_handles(tmp_path):
    path = tmp_path / "train.bin"
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    tokens = TokenFile(path, "uint16", 50257)
    starts = np.random.default_rng(0).integers(0, len(tokens) - 1025, (5000, 8))
    process = psutil.Process()

    def state():
        return process.memory_full_info().uss, process.num_fds()

    for row in starts[:100]:
        tokens.rows(row, 1025)
    memory, handles = state()
    for row in starts:
        tokens.rows(row, 1025)
    memory_after, handles_after = state()
    assert memory_after - memory < 20e6 and handles_after == handles


# nanoGPT's own folders


def nanogpt_folder(tmp_path, ids, pickled=None):
    np.asarray(ids, dtype="<u2").tofile(tmp_path / "train.bin")
    np.asarray(ids[:20], dtype="<u2").tofile(tmp_path / "val.bin")
    if pickled is not None:
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(pickled))
    return tmp_path


def test_a_nanogpt_folder_without_meta_is_gpt2_bpe(tmp_path):
    meta = open_dataset(nanogpt_folder(tmp_path, range(50_000))).meta
    assert (meta.dtype, meta.vocab_size, meta.max_id, meta.train_tokens, meta.val_tokens) == ("uint16", 50257, 49_999, 50_000, 20)
    assert (meta.tokenizer, meta.eot_id, meta.mask_token_id, meta.special_ids) == ("gpt2", 50256, 50257, (50256,))
    assert meta.val_bytes is None


def test_a_nanogpt_character_folder_brings_its_tables(tmp_path):
    tables = {"vocab_size": 65, "itos": dict(enumerate("abc")), "stoi": {"a": 0}}
    meta = open_dataset(nanogpt_folder(tmp_path, list(range(65)), tables)).meta
    assert (meta.vocab_size, meta.max_id, meta.mask_token_id, meta.eot_id) == (65, 64, 65, None)
    assert meta.tokenizer == str(tmp_path / "meta.pkl")


@pytest.mark.parametrize(
    "ids, pickled, words",
    [
        ([1, 2, 60_000], None, "id 60000, outside its vocabulary of 50257"),
        ([1, 2, 65], {"vocab_size": 65}, "id 65, outside its vocabulary of 65"),
        ([1, 2], {"vocab_size": "65"}, "vocab_size must be"),
        ([1, 2], [65], "holds a list"),
    ],
)
def test_a_nanogpt_folder_is_checked_too(tmp_path, ids, pickled, words):
    with pytest.raises(InputError, match=words):
        open_dataset(nanogpt_folder(tmp_path, ids, pickled))


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


HARMFUL = [pickle.dumps({"vocab_size": Harmful()}), pickle.dumps({"vocab_size": np.int64(65)}), b"cos\nsystem\n(S'mkdir harm'\ntR."]


@pytest.mark.parametrize("content", HARMFUL)
def test_a_pickle_with_classes_or_functions_is_refused_unread(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(InputError, match="only plain containers"):
        read_pickle(tmp_path / "meta.pkl")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"vocab_size": 65})[:-4]])
def test_a_damaged_pickle_is_an_input_error(tmp_path, content):
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(InputError, match="meta.pkl cannot be read"):
        read_pickle(tmp_path / "meta.pkl")
