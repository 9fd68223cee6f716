"""Text to token ids and back: bytes, tiktoken's encodings, Hugging Face tokenizers, and nanoGPT's character tables.

A tokenizer has `name` (what load_tokenizer takes again), `vocab_size` (ids that can be targets), `eot_id` (None only for
nanoGPT's character tables), `mask_token_id`, `special_ids`, and

    encode(text) -> list of ids    ordinary text: a special token spelt out in the text stays text
    decode_bytes(ids) -> bytes     UTF-8; an id without text becomes U+FFFD, never an error
    decode(ids) -> str             the same, as text
"""

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from commands import InputError

REPLACEMENT = "\ufffd".encode()
EOT_TEXT = "<|endoftext|>"
PIECE = 1 << 20  # characters; longer documents are encoded in pieces of about this size
BOUNDARY = re.compile(r"(?<=[^\W_])[ \n]")  # a letter or digit, then a space or line end: no token crosses this in the BPEs below
HUB_SECONDS = 10  # without an answer, before the hub counts as out of reach
EOT_NAMES = (EOT_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
MASK_NAMES = ("[MASK]", "<mask>")


class _Tokenizer:
    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class ByteTokenizer(_Tokenizer):
    """The 256 bytes of UTF-8, and 256 for the end of a text."""

    name = "bytes"
    eot_id = 256
    vocab_size = 257
    mask_token_id = 257
    special_ids = (256,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(bytes([i]) if 0 <= i < 256 else EOT_TEXT.encode() if i == self.eot_id else REPLACEMENT for i in map(int, ids))


class TiktokenTokenizer(_Tokenizer):
    """One of tiktoken's encodings (gpt2, cl100k_base, ...). Its file is fetched once, or found in TIKTOKEN_CACHE_DIR."""

    def __init__(self, name: str):
        import tiktoken

        try:
            self.encoding = tiktoken.get_encoding(name)
        except Exception as error:  # requests' connection errors, bad hashes, unwritable caches: all end the same way
            raise InputError(
                f"tokenizer {name}: tiktoken could not fetch its vocabulary ({_brief(error)}); set TIKTOKEN_CACHE_DIR to a folder that "
                "holds it, or choose --tokenizer bytes or a local tokenizer.json"
            ) from None
        self.name = name
        self.vocab_size = self.encoding.n_vocab
        self.eot_id = self.encoding.eot_token
        self.mask_token_id = self.vocab_size
        self.special_ids = tuple(sorted(map(self.encoding.encode_single_token, self.encoding.special_tokens_set)))

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes_of(int(i)) for i in ids)

    def _bytes_of(self, token: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token)
        except (KeyError, OverflowError):  # padding rows, the mask id, gaps in the vocabulary
            return REPLACEMENT


class HuggingFaceTokenizer(_Tokenizer):
    """A `tokenizer.json` (or its folder), or the name of a model on the Hugging Face hub."""

    def __init__(self, name: str):
        try:
            import tokenizers
        except ImportError:
            raise InputError(f"tokenizer {name}: reading it needs the package `tokenizers` (pip install tokenizers)") from None
        path = Path(name).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file() and path.suffix == ".json":
            raise InputError(f"tokenizer {name}: no such file")
        local = path.is_file()
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path) if local else _from_hub(name))
        except Exception as error:  # `tokenizers` raises bare Exception, the hub's client a dozen classes
            raise InputError(
                f"tokenizer {name}: neither bytes, nor a tiktoken encoding, nor a readable tokenizer.json or model name ({_brief(error)})"
            ) from None
        self.name = str(path.resolve()) if local else name
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # a special token spelt out in a document is ordinary text
        added = self.tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eot_id = next((special[text] for text in EOT_NAMES if text in special), size)
        self.vocab_size = max(size, self.eot_id + 1)
        self.mask_token_id = next((special[text] for text in MASK_NAMES if text in special), self.vocab_size)
        self.special_ids = tuple(sorted({*special.values(), self.eot_id}))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        run, text = [], b""
        for i in map(int, ids):  # known ids are decoded together, as a character's bytes may be spread over several
            if 0 <= i < self.vocab_size and self.tokenizer.id_to_token(i) is not None:
                run.append(i)
                continue
            text += self._run(run) + (EOT_TEXT.encode() if i == self.eot_id else REPLACEMENT)
            run = []
        return text + self._run(run)

    def _run(self, ids: list[int]) -> bytes:
        return self.tokenizer.decode(ids, skip_special_tokens=False).encode("utf-8", errors="replace") if ids else b""


class CharacterTokenizer(_Tokenizer):
    """The `stoi` and `itos` tables in the meta.pkl of nanoGPT's character datasets."""

    eot_id = None
    special_ids = ()

    def __init__(self, path: Path):
        from data.token_file import read_pickle

        tables = read_pickle(path)
        if not isinstance(tables.get("stoi"), dict) or not isinstance(tables.get("itos"), dict):
            raise InputError(f"tokenizer {path}: it holds no stoi and itos tables")
        self.name = str(path)
        self.stoi, self.itos = tables["stoi"], tables["itos"]
        self.vocab_size = self.mask_token_id = len(self.itos)

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - self.stoi.keys())
        if unknown:
            raise InputError(f"the characters {''.join(unknown)!r} are not in the vocabulary of {self.name}")
        return [self.stoi[character] for character in text]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return "".join(self.itos.get(int(i), "\ufffd") for i in ids).encode("utf-8", errors="replace")


def load_tokenizer(name: str):
    """The tokenizer called `name`. Raises InputError if there is none such, or if its vocabulary cannot be had."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.suffix == ".pkl" and path.is_file():
        return CharacterTokenizer(path)
    if path.suffix == ".json" or (path / "tokenizer.json").is_file():
        return HuggingFaceTokenizer(name)
    import tiktoken

    encodings = tiktoken.list_encoding_names()
    if name in encodings:
        return TiktokenTokenizer(name)
    near = difflib.get_close_matches(name, ["bytes", *encodings], n=1, cutoff=0.7)
    if near:
        known = ", ".join(["bytes", *encodings])
        raise InputError(f"unknown tokenizer {name!r}: did you mean {near[0]}? ({known}, a tokenizer.json or a model name)")
    return HuggingFaceTokenizer(name)


def tokenizer_identity(name: str) -> str:
    """`name`, with a digest of the file where it names one: it changes when the vocabulary does."""
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if (path / "tokenizer.json").is_file() else path
    if not path.is_file():
        return name
    return f"{path.resolve()} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """Cuts a document, given in blocks, into pieces of about PIECE characters whose tokens are those of the whole.

    A cut needs BOUNDARY; text without one (a megabyte of one letter) stays in one piece. Exact for bytes and for all of
    tiktoken's encodings; a tokenizer that treats the beginning of a text apart may differ by a token at a cut.
    """
    rest = ""
    for block in blocks:
        text, start, search = rest + block, 0, max(PIECE, len(rest))
        while cut := BOUNDARY.search(text, search):
            yield text[start : cut.start()]
            start, search = cut.start(), cut.start() + PIECE
        rest = text[start:]
    if rest:
        yield rest


def _from_hub(model: str) -> str:
    """The path of a model's tokenizer.json in the Hugging Face cache, downloaded if it is not there."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return huggingface_hub.hf_hub_download(model, "tokenizer.json", local_files_only=True)
    except LocalEntryNotFoundError:
        huggingface_hub.HfApi().model_info(model, timeout=HUB_SECONDS)  # a download would try for half a minute
        return huggingface_hub.hf_hub_download(model, "tokenizer.json")


def _brief(error: Exception) -> str:
    """One line of at most 160 characters: hub and connection errors run to paragraphs."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
