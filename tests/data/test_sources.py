import difflib
import gzip
import inspect
import json
import pydoc_data.topics
import sys

import pytest

from commands import InputError
from data import sources
from data.sources import SourceOptions, find_files, hub_documents, open_source


def read(name, **options) -> list[str]:
    """All documents of a source as whole texts."""
    return ["".join(document) for document in open_source(str(name), SourceOptions(**options)).documents()]


def write_parquet(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


# What is read


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    text = "one\r\ntwo\n\n\tthree — 😀\n"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8"))
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf" + text.encode("utf-8"))
    assert read(tmp_path / "a.txt") == read(tmp_path / "bom.txt") == [text]


def test_a_text_file_is_read_in_blocks_that_may_cut_a_character(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "READ_BYTES", 3)
    text = "é😀日本語" * 10
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert read(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines_plain_and_compressed(tmp_path, suffix):
    texts = ["first", "zweites — 😀", "line\nbreak", "", None]
    content = "\n".join(json.dumps({"text": text, "id": 1}) for text in texts).encode("utf-8") + b"\n\n"
    compress = {".jsonl": bytes, ".jsonl.gz": gzip.compress}.get(suffix)
    if compress is None:
        pyarrow = pytest.importorskip("pyarrow")
        compress = lambda data: pyarrow.compress(data, codec="zstd", asbytes=True)  # noqa: E731
    half = len(content) // 2
    joined = compress(content[:half]) + compress(content[half:])  # two frames in one file, as parallel compressors write
    (tmp_path / f"x{suffix}").write_bytes(joined)
    assert read(tmp_path / f"x{suffix}") == ["first", "zweites — 😀", "line\nbreak", "", ""]


def test_parquet(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", text=["a", None, "", "日本語"], other=[1, 2, 3, 4])
    assert read(path) == ["a", "", "", "日本語"]


def test_another_column(tmp_path, jsonl):
    path = tmp_path / "x.jsonl"
    path.write_text('{"content": "yes", "text": "no"}\n', encoding="utf-8")
    assert read(path, text_column="content") == ["yes"]
    assert read(write_parquet(tmp_path / "x.parquet", content=["yes"], text=["no"]), text_column="content") == ["yes"]


def test_folders_and_globs_in_order_of_name(tmp_path, jsonl):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("two", encoding="utf-8")
    (tmp_path / "1.txt").write_text("one", encoding="utf-8")
    jsonl("3.jsonl", "three", "four")
    (tmp_path / "readme.md").write_text("no", encoding="utf-8")
    (tmp_path / ".hidden.txt").write_text("no", encoding="utf-8")
    assert read(tmp_path) == ["one", "three", "four", "two"]
    assert read(tmp_path / "*.txt") == ["one"]
    assert read(tmp_path / "**" / "*.txt") == ["one", "two"]


def test_limit_counts_documents(tmp_path, jsonl):
    assert read(jsonl("x.jsonl", *"abcdef"), limit=2) == ["a", "b"]


@pytest.mark.parametrize(
    "written, read_as",
    [
        (r"x\ud800y", "x\ufffdy"),
        (r"\udc00", "\ufffd"),
        (r"\ud83d\ude00", "😀"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d 😀", "\ufffd 😀"),
    ],
)
def test_unpaired_surrogates_become_replacement_characters(tmp_path, written, read_as):
    (tmp_path / "x.jsonl").write_text(f'{{"text": "{written}"}}\n', encoding="utf-8")
    assert read(tmp_path / "x.jsonl") == [read_as]


def test_the_identity_follows_the_files(tmp_path, jsonl):
    path = jsonl("x.jsonl", "a")
    first = open_source(str(path)).identity
    assert open_source(str(tmp_path / "*.jsonl")).identity == first
    jsonl("x.jsonl", "a", "b")
    assert open_source(str(path)).identity != first


# What is wrong with it


@pytest.mark.parametrize(
    "content, words",
    [
        (b'{"text": "a"}\n{"text": \n', "x.jsonl:2: not JSON"),
        (b'{"text": "a"}\n["text"]\n', "x.jsonl:2: a list where an object"),
        (b'{"text": "a"}\n{"body": "a", "id": 1}\n', "x.jsonl:2: no column 'text'; choose one of body, id with --text-column"),
        (b'{"text": 5}\n', "x.jsonl:1: 'text' is a int, not a text"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "x.jsonl:2: invalid UTF-8 at byte 10"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, words):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(InputError) as error:
        read(tmp_path / "x.jsonl")
    assert words in str(error.value)


@pytest.mark.parametrize("read_bytes", [4, 1 << 20])
@pytest.mark.parametrize(
    "content, offset", [(b"abc\xff", 3), ("aé😀".encode() + b"\xe9x", 7), (b"0123456789\xf0\x9f\x98", 10), (b"\xff", 0)]
)
def test_invalid_utf8_in_a_text_file_is_located_or_replaced(tmp_path, monkeypatch, content, offset, read_bytes):
    monkeypatch.setattr(sources, "READ_BYTES", read_bytes)
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(InputError, match=f"x.txt: invalid UTF-8 at byte {offset} "):
        read(tmp_path / "x.txt")
    assert read(tmp_path / "x.txt", errors="replace") == [content.decode("utf-8", "replace")]


def test_a_parquet_file_without_the_column_lists_what_it_has(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", body=["a"], url=["b"])
    with pytest.raises(InputError, match="x.parquet: no column 'text'; choose one of body, url with --text-column"):
        read(path)
    with pytest.raises(InputError, match="row 1: 'n' is a int"):
        read(write_parquet(tmp_path / "n.parquet", n=[5]), text_column="n")


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.gz", "x.jsonl.zst"])
def test_a_file_that_is_not_what_its_name_says(tmp_path, name):
    (tmp_path / name).write_bytes(b"plain text, nothing else\n")
    with pytest.raises(InputError, match=name):
        read(tmp_path / name)


def test_a_cut_gzip_file_is_an_input_error(tmp_path):
    whole = gzip.compress(json.dumps({"text": "a"}).encode() + b"\n" + b"x" * 1000)
    (tmp_path / "x.jsonl.gz").write_bytes(whole[:-10])
    with pytest.raises(InputError, match="x.jsonl.gz"):
        read(tmp_path / "x.jsonl.gz")


def test_what_cannot_be_found_is_an_input_error(tmp_path):
    for name, words in (("no/such.jsonl", "no such file"), (f"{tmp_path}/*.txt", "no such file"), (str(tmp_path), "holds no .txt")):
        with pytest.raises(InputError, match=words):
            open_source(name)
    (tmp_path / "x.pdf").write_bytes(b"")
    with pytest.raises(InputError, match="unknown kind of file; these are read: .txt"):
        find_files(str(tmp_path / "x.pdf"))


# Hugging Face datasets


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder of parquet files that `datasets` streams like a repository of the hub, without a network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "repository"
    folder.mkdir()
    write_parquet(folder / "train-00000-of-00002.parquet", text=["one", None], url=["a", "b"])
    write_parquet(folder / "train-00001-of-00002.parquet", text=["", "four"], url=["c", "d"])
    return folder


def test_openwebtext_is_streamed_from_parquet(hub, monkeypatch):
    monkeypatch.setitem(sources.HUB_NAMES, "openwebtext", str(hub))
    assert read("openwebtext") == ["one", "", "", "four"]
    assert read("openwebtext", limit=1, text_column="url") == ["a"]


def test_a_hub_dataset_without_the_column_or_split_is_an_input_error(hub):
    with pytest.raises(InputError, match="row 1: no column 'body'; choose one of text, url"):
        list(hub_documents(str(hub), SourceOptions(text_column="body")))
    with pytest.raises(InputError, match="test"):
        list(hub_documents(str(hub), SourceOptions(split="test")))


def test_a_dataset_with_a_script_is_read_from_the_hubs_own_conversion(hub, monkeypatch):
    import datasets

    asked = []

    def load_dataset(*arguments, really=datasets.load_dataset, revision=None, **options):
        asked.append(revision)
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found x.py")
        return really(*arguments, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(list(hub_documents(str(hub), SourceOptions()))) == 4
    assert asked == [None, "refs/convert/parquet"]


def test_no_network_is_one_line(execute, tmp_path):
    done = execute("-m", "data.prepare", "openwebtext", "--tokenizer", "bytes", "--out", tmp_path / "out", HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "Skylion007/openwebtext" in done.stderr and ".jsonl" in done.stderr
    assert not (tmp_path / "out").exists()


# This Python's documentation


@pytest.fixture(scope="module")
def pydocs() -> list[str]:
    before = set(sys.modules)
    documents = read("pydocs")
    assert not {"antigravity", "turtle", "ensurepip", "imaplib"} & (set(sys.modules) - before), "the sources were imported"
    return documents


def test_pydocs_is_about_two_megabytes_of_english_without_repetition(pydocs):
    text = "".join(pydocs)
    assert 1.5e6 < len(text.encode("utf-8")) < 4e6
    assert len(set(pydocs)) == len(pydocs) > 300
    words = text.split()
    assert words.count("the") / len(words) > 0.03
    assert sum(character.isascii() for character in text) / len(text) > 0.995
    paragraphs = [paragraph for paragraph in text.split("\n\n") if len(paragraph) > 300]
    assert len(set(paragraphs)) / len(paragraphs) > 0.995


def test_pydocs_holds_the_language_reference_and_the_modules_documentation(pydocs):
    """In the order of the source: the module first, its definitions as they come."""
    assert pydoc_data.topics.topics["assert"].strip() + "\n" in pydocs
    strings = [inspect.getdoc(thing) for thing in (difflib, difflib.SequenceMatcher, difflib.Differ, difflib.unified_diff)]
    (document,) = [text for text in pydocs if strings[1] in text]
    places = [document.index(string) for string in strings]
    assert places[0] == 0 and places == sorted(places)


def test_pydocs_needs_the_topics(monkeypatch, tmp_path):
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match="topics.py"):
        read("pydocs")


def test_importing_loads_no_optional_package(execute):
    optional = {"datasets", "pyarrow", "tiktoken", "tokenizers", "torch"}
    assert execute("-c", f"import sys, data.prepare; print({optional} & set(sys.modules))").stdout == "set()\n"
    assert sys.version_info >= (3, 11)
