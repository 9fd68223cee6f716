import numpy as np
import pytest

from commands import InputError
from data.inspect import main


@pytest.fixture
def dataset(jsonl, tmp_path):
    from data.prepare import Recipe, prepare

    source = jsonl("x.jsonl", *(f"document {i}\nwith two lines" for i in range(50)))
    prepare(Recipe(str(source), "bytes", val_fraction=0.2), tmp_path / "dataset")
    return tmp_path / "dataset"


def test_it_shows_numbers_and_text(execute, dataset):
    done = execute("-m", "data.inspect", dataset, "--tokens", 12)
    assert done.returncode == 0 and done.stderr == ""
    assert "tokenizer   bytes\n" in done.stdout and "vocabulary  257 ids, the largest in use 256; uint16\n" in done.stdout
    assert "documents, " in done.stdout and "bytes per token" in done.stdout
    assert "train text  'document 0\\nw'\n" in done.stdout and "val text    'document " in done.stdout


def test_verify_finds_what_sizes_do_not_show(dataset, capsys):
    main([str(dataset), "--verify"])
    assert "the checksum is right" in capsys.readouterr().out
    ids = np.fromfile(dataset / "train.bin", dtype="<u2")
    ids[0] ^= 1
    ids.tofile(dataset / "train.bin")
    main([str(dataset)])
    with pytest.raises(InputError, match="another checksum"):
        main([str(dataset), "--verify"])
    ids[:] = 3
    ids.tofile(dataset / "train.bin")
    np.fromfile(dataset / "val.bin", dtype="<u2").clip(max=9).tofile(dataset / "val.bin")
    with pytest.raises(InputError, match="the largest id is 9, where its meta says 256"):
        main([str(dataset), "--verify"])


def test_a_dataset_without_its_tokenizer_is_described_all_the_same(dataset, edit_meta, capsys):
    edit_meta(dataset, tokenizer="/none/tokenizer.json")
    main([str(dataset)])
    out = capsys.readouterr().out
    assert "no text can be shown: tokenizer /none/tokenizer.json" in out and "checksum" in out


def test_nanogpt_folders(tmp_path, capsys):
    for split in ("train", "val"):
        np.arange(100, dtype="<u2").tofile(tmp_path / f"{split}.bin")
    main([str(tmp_path), "--verify"])
    out = capsys.readouterr().out
    assert "prepared for nanoGPT" in out and "100 tokens\n" in out and "unknown" in out


def test_no_dataset_is_one_line(execute, tmp_path):
    done = execute("-m", "data.inspect", tmp_path / "none")
    assert done.returncode == 2 and "python -m data.prepare" in done.stderr and done.stderr.count("\n") == 1
