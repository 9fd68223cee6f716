"""Documents from anywhere: this Python's own documentation, local files, folders and globs, and Hugging Face datasets."""

import ast
import glob
import gzip
import hashlib
import io
import json
import re
import sysconfig
import warnings
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from commands import InputError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
HUB_NAMES = {"openwebtext": "Skylion007/openwebtext"}  # the corpus as parquet; the old name holds a loading script
PARQUET_REVISION = "refs/convert/parquet"  # the branch where the hub keeps its own conversion of datasets with scripts
NOT_DOCUMENTED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "lib2to3", "__pycache__"}
SHORT_PARAGRAPH = 100  # characters; shorter ones ("Example:") may well occur twice
READ_BYTES = 1 << 20
HUB_SECONDS = 10  # without an answer, before the hub counts as out of reach

Document = Iterable[str]  # its text in one or more blocks; without any text where the document is empty or null


@dataclass(frozen=True)
class SourceOptions:
    """How sources are read. Every field is a flag of `data.prepare`."""

    text_column: str = "text"
    errors: str = "strict"  # or "replace": invalid UTF-8 becomes U+FFFD
    limit: int | None = None  # documents
    split: str = "train"  # of a hub dataset
    subset: str | None = None  # of a hub dataset: its configuration


@dataclass(frozen=True)
class Source:
    """`identity` changes when local files do; `size` is about the number of bytes of text, None where nobody knows."""

    name: str
    identity: str
    size: int | None
    documents: Callable[[], Iterator[Document]]


def open_source(name: str, options: SourceOptions = SourceOptions()) -> Source:
    """Finds a source by name. Raises InputError if there is none; reading raises it too, with file, line or byte offset."""
    if name == "pydocs":
        return _limited(Source(name, name, None, python_documentation), options)
    if name not in HUB_NAMES and _is_local(name):
        return _limited(_local(name, find_files(name), options), options)
    return _limited(Source(name, name, None, lambda: hub_documents(HUB_NAMES.get(name, name), options)), options)


def _limited(source: Source, options: SourceOptions) -> Source:
    if options.limit is None:
        return source
    return Source(source.name, source.identity, None, lambda: islice(source.documents(), options.limit))


# Local files


def _local(name: str, paths: list[Path], options: SourceOptions) -> Source:
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    size = sum(size for _, size, _ in states)
    digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]  # of names, sizes and times, not of gigabytes of text
    return Source(
        name=name,
        identity=f"{len(paths)} files, {size} bytes, {digest}",
        size=size if all(path.suffix in (".txt", ".jsonl") for path in paths) else None,
        documents=lambda: (document for path in paths for document in read_file(path, options)),
    )


def _is_local(name: str) -> bool:
    looks_local = name.startswith((".", "/", "~")) or any(c in name for c in "*?[") or name.endswith(SUFFIXES) or name.count("/") > 1
    return looks_local or Path(name).expanduser().exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)


def find_files(name: str) -> list[Path]:
    """The files that a path, a folder (all levels) or a glob names, sorted. Raises InputError if there are none that can be read."""
    path = Path(name).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file() and not p.name.startswith("."))
        if not found:
            raise InputError(f"{name} holds no {', '.join(SUFFIXES)} files")
        return found
    if path.exists():
        found = [path]
    else:
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not found:
            raise InputError(f"{name}: no such file or folder")
    for file in found:
        if not file.name.endswith(SUFFIXES):
            raise InputError(f"{file}: unknown kind of file; these are read: {', '.join(SUFFIXES)}")
    return found


def read_file(path: Path, options: SourceOptions) -> Iterator[Document]:
    """The documents of one file: a .txt is one, a .jsonl has one per line, a .parquet one per row."""
    if path.suffix == ".txt":
        yield _decoded(path, options.errors)
    elif path.suffix == ".parquet":
        yield from _parquet(path, options)
    else:
        yield from _json_lines(path, options)


def _decoded(path: Path, errors: str) -> Iterator[str]:
    decoder = getincrementaldecoder("utf-8-sig")(errors)
    offset = 0  # bytes handed to the decoder before this block
    with open(path, "rb") as file:
        while True:
            block = file.read(READ_BYTES)
            kept = len(decoder.getstate()[0])  # bytes of an unfinished character, which `error.start` counts too
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _invalid(path, offset - kept + error.start) from None
            if not block:
                return
            offset += len(block)


def _invalid(where: object, offset: int) -> InputError:
    return InputError(f"{where}: invalid UTF-8 at byte {offset} (--errors=replace puts U+FFFD there)")


def _json_lines(path: Path, options: SourceOptions) -> Iterator[Document]:
    with _opened(path) as file:
        for number, line in enumerate(_lines(file, path), start=1):
            where = f"{path}:{number}"
            try:
                line = line.decode("utf-8-sig" if number == 1 else "utf-8", options.errors)
            except UnicodeDecodeError as error:
                raise _invalid(where, error.start) from None
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise InputError(f"{where}: a {type(row).__name__} where an object with a text column was expected")
            yield _text(row, options.text_column, where)


def _opened(path: Path):
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return open(path, "rb")


def _lines(file, path: Path) -> Iterator[bytes]:
    try:
        yield from file
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: damaged or not the compression that its name says ({error})") from None


def _parquet(path: Path, options: SourceOptions) -> Iterator[Document]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            columns = table.schema_arrow.names
            if options.text_column not in columns:
                raise _no_column(path, options.text_column, columns)
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[options.text_column]):
                for value in batch.column(0):
                    number += 1
                    yield _text({options.text_column: value.as_py()}, options.text_column, f"{path}, row {number}")
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a readable parquet file ({error})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, row {number}: invalid UTF-8 at byte {error.start}") from None


def _no_column(where: object, column: str, columns: Iterable[str]) -> InputError:
    return InputError(f"{where}: no column {column!r}; choose one of {', '.join(map(str, columns))} with --text-column")


def _text(row: dict, column: str, where: object) -> Document:
    """The document in a row; no blocks where it is null. A lone surrogate, which no file can hold, becomes U+FFFD."""
    if column not in row:
        raise _no_column(where, column, row)
    text = row[column]
    if text is None:
        return ()
    if not isinstance(text, str):
        raise InputError(f"{where}: {column!r} is a {type(text).__name__}, not a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return (text,)


# Hugging Face datasets


def hub_documents(name: str, options: SourceOptions) -> Iterator[Document]:
    """The rows of a Hugging Face dataset (or of a local folder of parquet files), streamed; no loading scripts are ever run."""
    number = 0
    try:
        for number, row in enumerate(_stream(name, options), start=1):
            yield _text(row, options.text_column, f"{name}, row {number}")
    except InputError:
        raise
    except Exception as error:  # connections, missing datasets and splits, gated access: a dozen classes of four packages
        reason = " ".join(str(error).split()) or type(error).__name__
        where = f"{name}, after row {number}" if number else f"{name} is no local file, and as a Hugging Face dataset it fails"
        raise InputError(f"{where}: {reason[:200]} (without a network, give local .txt, .jsonl or .parquet files)") from None


def _stream(name: str, options: SourceOptions):
    import datasets
    import huggingface_hub

    if not Path(name).is_dir():
        huggingface_hub.HfApi().dataset_info(name, timeout=HUB_SECONDS)  # `datasets` would try for half a minute
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, options.subset, split=options.split, streaming=True)
    except RuntimeError as error:
        if "script" not in str(error):
            raise
        return datasets.load_dataset(name, options.subset, split=options.split, streaming=True, revision=PARQUET_REVISION)


# This Python's own documentation


def python_documentation() -> Iterator[Document]:
    """About 2 MB of English in every Python: the language reference of `pydoc` and the standard library's documentation strings.

    One document per topic and per module, in order of name; strings and longer paragraphs that occur twice are kept once, so
    that no held-out text stands in the training text too. Sources are parsed, never imported.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    topics = root / "pydoc_data" / "topics.py"
    if not topics.is_file():
        raise InputError(f"pydocs: this Python has no {topics}; give a text file instead")
    groups = [[text.strip()] for text in _topics(_parsed(topics))]
    modules = (path for path in sorted(root.rglob("*.py")) if NOT_DOCUMENTED.isdisjoint(path.relative_to(root).parts))
    seen = set()
    for group in chain(groups, (_docstrings(_parsed(path)) for path in modules)):
        strings = [_new_paragraphs(text, seen) for text in group if text not in seen]
        if any(strings):
            yield ("\n\n".join(filter(None, strings)) + "\n",)


def _new_paragraphs(text: str, seen: set[str]) -> str:
    """`text` without the paragraphs in `seen`, short ones excepted; adds the text and its paragraphs to `seen`."""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if len(paragraph) < SHORT_PARAGRAPH or paragraph not in seen]
    seen.update((text, *paragraphs))
    return "\n\n".join(paragraphs)


def _topics(module: ast.Module) -> list[str]:
    """The texts of the dict that pydoc_data/topics.py assigns, in order of their names."""
    tables = [statement.value for statement in module.body if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)]
    return [text for table in tables for _, text in sorted(ast.literal_eval(table).items())]


def _parsed(path: Path) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # invalid escapes in old modules
        return ast.parse(path.read_bytes())


def _docstrings(node: ast.AST) -> Iterator[str]:
    """The documentation strings of a module and of all that it defines, in the order of the source."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler)):
            yield from _docstrings(child)
