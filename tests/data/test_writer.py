import hashlib
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from data.token_file import open_dataset
from data.writer import COPY_BYTES, DatasetWriter


def ids(*values) -> np.ndarray:
    return np.array(values, dtype="<u2")


def test_nothing_is_visible_before_publish(tmp_path):
    folder = tmp_path / "new" / "dataset"
    with DatasetWriter(folder, "uint16") as writer:
        writer.append("train", ids(1, 2, 3))
        writer.append("val", ids(4))
        assert [path.name for path in folder.iterdir() if not path.name.startswith(".partial-")] == []
        writer.publish(vocab_size=10, mask_token_id=10)
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "meta.pkl", "train.bin", "val.bin"]


def test_the_files_are_flat_and_described(tmp_path):
    with DatasetWriter(tmp_path, "uint32") as writer:
        writer.append("train", np.array([1, 70_000], dtype="<u4"))
        writer.append("train", np.array([2], dtype="<u4"))
        writer.append("val", np.array([3], dtype="<u4"))
        meta = writer.publish(vocab_size=80_000, mask_token_id=80_000, source="tests")
    content = (tmp_path / "train.bin").read_bytes() + (tmp_path / "val.bin").read_bytes()
    assert content == np.array([1, 70_000, 2, 3], dtype="<u4").tobytes()
    assert meta.checksum == "sha256:" + hashlib.sha256(content).hexdigest()
    assert (meta.dtype, meta.max_id, meta.train_tokens, meta.val_tokens) == ("uint32", 70_000, 3, 1)
    assert json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))["source"] == "tests"
    assert pickle.loads((tmp_path / "meta.pkl").read_bytes()) == {"vocab_size": 80_000}
    assert open_dataset(tmp_path).meta == meta


def test_an_error_leaves_the_folder_as_it_was(tmp_path, write_dataset):
    folder = write_dataset([1, 2], [3])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for where in (folder, tmp_path / "a" / "b"):
        with pytest.raises(RuntimeError), DatasetWriter(where, "uint16") as writer:
            writer.append("train", ids(9))
            raise RuntimeError
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not (tmp_path / "a").exists()


def test_remains_of_a_killed_writer_are_removed(tmp_path):
    (tmp_path / ".partial-old").mkdir()
    (tmp_path / ".partial-old" / "train.bin").write_bytes(b"..")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with DatasetWriter(tmp_path, "uint16"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_full_disk_is_one_line_and_leaves_nothing(execute, tmp_path):
    """A limit on the size of files stands in for the disk."""
    resource = pytest.importorskip("resource", reason="no file-size limits on this system")
    source = tmp_path / "x.txt"
    source.write_text("some text " * 100_000, encoding="utf-8")
    command = [sys.executable, "-m", "data.prepare", source, "--tokenizer", "bytes", "--out", tmp_path / "out"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # noqa: E731
    done = subprocess.run(command, env=execute.environment(), preexec_fn=limit, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "File too large" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fail_at", range(4))
def test_a_folder_with_a_train_file_is_whole_whenever_the_writer_is_stopped(write_dataset, monkeypatch, fail_at):
    folder = write_dataset([1, 2], [3], vocab_size=10)
    replaced = []

    def replace(source, target, really=os.replace):
        if len(replaced) == fail_at:
            raise KeyboardInterrupt
        replaced.append(target)
        really(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt), DatasetWriter(folder, "uint16") as writer:
        writer.append("train", ids(7, 8, 9))
        writer.append("val", ids(7))
        writer.publish(vocab_size=20, mask_token_id=20)
    assert not (folder / "train.bin").exists()


@pytest.mark.parametrize("start, stop", [(0, 3), (4, 7), (8, 10), (0, 10), (5, 5)])
@pytest.mark.parametrize("copy_bytes", [4, COPY_BYTES])
def test_move_takes_a_slice_to_the_other_split(tmp_path, monkeypatch, start, stop, copy_bytes):
    monkeypatch.setattr("data.writer.COPY_BYTES", copy_bytes)
    train = list(range(10))
    with DatasetWriter(tmp_path, "uint16") as writer:
        writer.append("train", ids(*train))
        writer.append("val", ids(100))
        moved = writer.move("train", start, stop)
        writer.append("train", ids(50))
        writer.publish(vocab_size=200, mask_token_id=200)
    dataset = open_dataset(tmp_path)
    assert moved.tolist() == train[start:stop]
    assert dataset.train[:].tolist() == train[:start] + train[stop:] + [50]
    assert dataset.val[:].tolist() == [100] + train[start:stop]
