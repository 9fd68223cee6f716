import sys

import numpy as np
import pytest

from commands import InputError
from data.prepare import Recipe, main, prepare
from data.sources import SourceOptions
from data.token_file import open_dataset
from data.tokenizers import load_tokenizer

TEXTS = [f"document {i}: " + "some text that is long enough " * (i % 5 + 1) for i in range(200)]


def split_documents(tokens) -> list[str]:
    """The documents of a split of byte ids, each of which has ended."""
    ids = tokens[:]
    assert len(ids) == 0 or ids[-1] == 256
    return [bytes(part.tolist()).decode("utf-8") for part in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1] for part in [part[:-1]]]


@pytest.fixture
def make(tmp_path):
    """make(path, ...) -> the Dataset of bytes that prepare makes of it."""

    def run(path, out="out", **recipe):
        overwrite = recipe.pop("overwrite", False)
        meta = prepare(Recipe(str(path), recipe.pop("tokenizer", "bytes"), **recipe), tmp_path / out, overwrite=overwrite)
        dataset = open_dataset(tmp_path / out)
        assert dataset.meta == meta
        return dataset

    return run


def test_every_document_is_in_one_split_once_in_order(make, jsonl):
    dataset = make(jsonl("x.jsonl", *TEXTS, "", None))
    train, val = split_documents(dataset.train), split_documents(dataset.val)
    assert sorted(train + val) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)] and val == [text for text in TEXTS if text in set(val)]
    meta = dataset.meta
    assert (meta.train_documents, meta.val_documents, meta.dropped_documents) == (len(train), len(val), 2)
    assert meta.train_bytes == sum(map(len, train)) and meta.val_bytes == sum(map(len, val))
    assert meta.train_tokens == meta.train_bytes + len(train)
    assert (meta.vocab_size, meta.eot_id, meta.max_id, meta.mask_token_id, meta.special_ids) == (257, 256, 256, 257, (256,))


def test_the_split_follows_the_seed_and_not_the_other_documents(make, jsonl):
    first = set(split_documents(make(jsonl("x.jsonl", *TEXTS)).val))
    assert set(split_documents(make(jsonl("y.jsonl", *TEXTS[::-1], "another"), out="y").val)) - {"another"} == first
    assert set(split_documents(make(jsonl("x.jsonl", *TEXTS), out="z", seed=2).val)) != first
    assert 2 <= len(first) <= 25  # of 200 at 5 %


def test_equal_texts_share_a_split(make, jsonl):
    dataset = make(jsonl("x.jsonl", *TEXTS, *TEXTS), val_fraction=0.3)
    assert not set(split_documents(dataset.train)) & set(split_documents(dataset.val))


def test_the_data_are_the_same_every_time(make, jsonl):
    path = jsonl("x.jsonl", *TEXTS)
    assert make(path).meta.checksum == make(path, out="again").meta.checksum


@pytest.mark.parametrize("fraction, full", [(1e-9, "train"), (1 - 1e-9, "val")])
@pytest.mark.parametrize("n", [2, 3, 40])
def test_a_split_that_the_hash_leaves_empty_gets_one_document(make, jsonl, capsys, fraction, full, n):
    dataset = make(jsonl("x.jsonl", *TEXTS[:n]), val_fraction=fraction)
    empty = "val" if full == "train" else "train"
    documents = {split: split_documents(getattr(dataset, split)) for split in ("train", "val")}
    assert len(documents[empty]) == 1 and sorted(documents["train"] + documents["val"]) == sorted(TEXTS[:n])
    assert getattr(dataset.meta, f"{empty}_bytes") == len(documents[empty][0])
    assert getattr(dataset.meta, f"{full}_bytes") == sum(map(len, documents[full]))
    assert f"the hash gave {empty} no document" in capsys.readouterr().out
    wider = make(jsonl("x.jsonl", *TEXTS[:n]), out="wider", val_fraction=0.5)  # the one it got is the next that a threshold would give it
    assert documents[empty][0] in split_documents(getattr(wider, empty)) or n < 40


@pytest.mark.parametrize("fraction, val_tokens", [(0.05, 51), (0.5, 506), (1e-6, 1), (1 - 1e-6, 1010)])
def test_a_single_document_is_cut_at_a_token_and_says_so(make, tmp_path, capsys, fraction, val_tokens):
    text = "0123456789" * 101
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    dataset = make(tmp_path / "one.txt", val_fraction=fraction)
    assert f"only one document: its last {val_tokens:,} tokens" in capsys.readouterr().out
    assert [*dataset.train[:], *dataset.val[:]] == [*text.encode(), 256]
    assert (dataset.meta.train_tokens, dataset.meta.val_tokens) == (1011 - val_tokens, val_tokens)
    assert (dataset.meta.train_bytes, dataset.meta.val_bytes) == (1011 - val_tokens, val_tokens - 1)


@pytest.mark.parametrize("fraction, empty", [(0.0, "val"), (1.0, "train")])
@pytest.mark.parametrize("n", [1, 5])
def test_fractions_of_nothing_and_of_all_leave_a_split_empty(make, jsonl, fraction, empty, n):
    dataset = make(jsonl("x.jsonl", *TEXTS[:n]), val_fraction=fraction)
    full = "train" if empty == "val" else "val"
    assert len(getattr(dataset, empty)) == 0 and getattr(dataset.meta, f"{empty}_documents") == 0
    assert split_documents(getattr(dataset, full)) == TEXTS[:n]


def test_no_documents_is_an_input_error(make, jsonl, tmp_path):
    with pytest.raises(InputError, match=r"holds no documents with text \(2 empty or null\)"):
        make(jsonl("x.jsonl", "", None))
    with pytest.raises(InputError, match="holds no documents"):
        make(jsonl("empty.jsonl"))
    assert not (tmp_path / "out").exists()


def test_special_tokens_in_a_text_stay_text(make, jsonl, gpt2):
    dataset = make(jsonl("x.jsonl", "see <|endoftext|> here", "and [MASK] [PAD]"), tokenizer="gpt2", val_fraction=0.0)
    ids = dataset.train[:].tolist()
    assert ids.count(50256) == 2 and ids[-1] == 50256
    assert gpt2.decode(ids) == "see <|endoftext|> here<|endoftext|>and [MASK] [PAD]<|endoftext|>"


def test_gpt2_ids_are_tiktokens(make, tmp_path, gpt2):
    import pydoc_data.topics

    text = "\n".join(pydoc_data.topics.topics.values())
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    dataset = make(tmp_path / "x.txt", tokenizer="gpt2", val_fraction=0.1)
    assert [*dataset.train[:], *dataset.val[:]] == [*gpt2.encoding.encode_ordinary(text), 50256]
    assert dataset.meta.dtype == "uint16" and dataset.meta.train_bytes + dataset.meta.val_bytes == len(text.encode("utf-8"))


def test_large_vocabularies_are_written_wide(make, tmp_path):
    hf = pytest.importorskip("tokenizers")
    words = hf.Tokenizer(hf.models.WordLevel({"?": 0, "rare": 70_000}, unk_token="?"))
    words.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text("rare rare", encoding="utf-8")
    dataset = make(tmp_path / "x.txt", tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0.0)
    assert dataset.meta.dtype == "uint32" and dataset.train[:].tolist() == [70_000, 70_000, 70_001]
    assert load_tokenizer(dataset.meta.tokenizer).decode([70_000]) == "rare"


# Again


def test_the_same_recipe_again_reuses_what_is_there(make, jsonl, tmp_path, capsys):
    path = jsonl("x.jsonl", *TEXTS)
    make(path)
    written = (tmp_path / "out" / "train.bin").stat().st_mtime_ns
    capsys.readouterr()
    make(path)
    assert "finished already, with the same settings: reused" in capsys.readouterr().out
    assert (tmp_path / "out" / "train.bin").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"val_fraction": 0.2}, "val_fraction"),
        ({"seed": 2}, "seed"),
        ({"options": SourceOptions(limit=3)}, "limit"),
        ({"tokenizer": "json"}, "tokenizer"),
    ],
)
def test_another_recipe_is_refused_unless_told_to_overwrite(make, jsonl, tokenizer_json, changes, named):
    path = jsonl("x.jsonl", *TEXTS)
    before = make(path)
    if "tokenizer" in changes:
        changes = {"tokenizer": str(tokenizer_json)}
    with pytest.raises(InputError, match=f"made with another {named}: add --overwrite"):
        make(path, **changes)
    assert open_dataset(before.folder).meta == before.meta
    assert make(path, overwrite=True, **changes).meta != before.meta


def test_changed_files_are_another_source(make, jsonl):
    make(jsonl("x.jsonl", *TEXTS))
    with pytest.raises(InputError, match="made with another source"):
        make(jsonl("x.jsonl", *TEXTS[:5]))


def test_a_damaged_dataset_is_not_reused(make, jsonl, tmp_path):
    path = jsonl("x.jsonl", *TEXTS)
    make(path)
    (tmp_path / "out" / "train.bin").write_bytes(b"....")
    with pytest.raises(InputError, match="truncated"):
        make(path)
    make(path, overwrite=True)


def test_a_nanogpt_folder_is_not_overwritten_by_accident(make, jsonl, tmp_path):
    (tmp_path / "out").mkdir()
    for split in ("train", "val"):
        np.arange(100, dtype="<u2").tofile(tmp_path / "out" / f"{split}.bin")
    with pytest.raises(InputError, match="add --overwrite"):
        make(jsonl("x.jsonl", *TEXTS))


# The command


def test_the_command_end_to_end(execute, jsonl, tmp_path):
    done = execute("-m", "data.prepare", jsonl("x.jsonl", *TEXTS, ""), "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert done.returncode == 0 and done.stderr == ""
    meta = open_dataset(tmp_path / "out").meta
    assert f"{meta.train_tokens:,} training tokens ({meta.train_documents} documents)" in done.stdout
    assert f"{meta.val_tokens:,} validation tokens" in done.stdout and "1 empty documents dropped" in done.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        (["no/such.jsonl"], "no/such.jsonl: no such file"),
        (["{bad}"], "bad.jsonl:2: not JSON"),
        (["{bad}", "--val-fraction=2"], "'2' is no number from 0 to 1"),
        (["{bad}", "--val-fraction=x"], "'x' is no number"),
        (["{bad}", "--limit=0"], "'0' is no whole number"),
        (["{bad}", "--workers=many"], "'many' is no whole number"),
        (["{bad}", "--sead=2"], "--sead"),
        (["{bad}", "--text-column=body"], "bad.jsonl:1: no column 'body'; choose one of text"),
        ([], "source"),
    ],
)
def test_bad_input_is_one_line_status_2_and_nothing_written(execute, jsonl, tmp_path, words, said):
    bad = jsonl("bad.jsonl", "fine")
    bad.write_text(bad.read_text(encoding="utf-8") + '{"text": \n', encoding="utf-8")
    words = [word.format(bad=bad) for word in words]
    done = execute("-m", "data.prepare", *words, "--tokenizer", "bytes", "--out", tmp_path / "out" / "deep")
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()


def test_help_names_every_source_and_says_what_the_extreme_fractions_do(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for words in ("pydocs", "openwebtext", ".jsonl[.gz|.zst]", "0 leaves val.bin empty", "1 leaves train.bin empty", "--overwrite"):
        assert words in text


NO_NETWORK = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        print("touched the network:", event, arguments, file=sys.stderr)
        raise SystemExit(99)
sys.addaudithook(refuse)
"""


def test_local_files_touch_no_network(execute, tmp_path, jsonl, tokenizer_json):
    """Every process, the workers included, runs under a hook that ends it where it looks up a host or connects to one."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
    offline = {"PYTHONPATH": str(tmp_path / "hook"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    witness = execute("-c", "import socket; socket.getaddrinfo('localhost', 80)", **offline)
    assert "touched the network" in witness.stderr
    source = jsonl("x.jsonl", *TEXTS)
    for number, tokenizer in enumerate(["bytes", tokenizer_json]):
        done = execute("-m", "data.prepare", source, "--tokenizer", tokenizer, "--out", tmp_path / f"out{number}", **offline)
        assert done.returncode == 0 and done.stderr == "", done.stderr


PEAK = """
import sys
from data.prepare import main
main(sys.argv[1:])
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("fraction", [0.05, 0.9])
def test_memory_stays_bounded_on_a_long_text(execute, tmp_path, fraction):
    """25 MB in one document, one character of it beyond the first plane, which makes Python's strings four times as wide."""
    path = tmp_path / "long.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and the dog sleeps on\n" * 370_000 + "😀", encoding="utf-8")
    done = execute("-c", PEAK, path, "--tokenizer", "bytes", "--val-fraction", fraction, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-2]) * 1024
    assert 30e6 < peak < 175e6  # the interpreter with NumPy takes 40 MB; the text as one string would take 100 MB, as a list 200 MB
