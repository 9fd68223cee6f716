import pickle
import random

import pytest

from commands import InputError
from data import tokenizers
from data.tokenizers import ByteTokenizer, load_tokenizer, pieces, tokenizer_identity

TEXTS = ["", "Hello, world!", "naïve café — “quoted” 😀 \x00 \t\r\n", "日本語テキスト", " leading", "a" * 5000]
TEXTS += ["<|endoftext|> [MASK] [PAD] <|im_start|>"]


@pytest.fixture(params=["bytes", "gpt2", "json"])
def tokenizer(request, tokenizer_json):
    if request.param == "gpt2":
        return request.getfixturevalue("gpt2")
    return load_tokenizer(str(tokenizer_json) if request.param == "json" else request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_and_special_tokens_in_it_stay_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert isinstance(ids, list) and all(0 <= i < tokenizer.vocab_size for i in ids)
    assert not set(ids) & set(tokenizer.special_ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode("utf-8")


def test_ids_without_text_are_decoded_to_something(tokenizer):
    hello = tokenizer.encode("Hello")
    strange = [tokenizer.mask_token_id, tokenizer.vocab_size + 46, 2**40, -1]
    text = tokenizer.decode([*hello, *strange, tokenizer.eot_id, *hello])
    assert text.startswith("Hello") and text.endswith("<|endoftext|>Hello") and text.count("\ufffd") >= 3
    assert tokenizer.decode(hello[:1] + tokenizer.encode("é")[:1]) is not None  # half a character


def test_facts_of_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eot_id, tokenizer.mask_token_id) == (257, 256, 257)
    assert tokenizer.encode("é") == [0xC3, 0xA9]


def test_facts_of_gpt2(gpt2):
    assert (gpt2.vocab_size, gpt2.eot_id, gpt2.mask_token_id, gpt2.special_ids) == (50257, 50256, 50257, (50256,))
    assert gpt2.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.encode("!") == [0]


def test_facts_of_a_tokenizer_json(tokenizer_json):
    tokenizer = load_tokenizer(str(tokenizer_json))
    assert (tokenizer.eot_id, tokenizer.mask_token_id, tokenizer.special_ids) == (0, 1, (0, 1))
    assert tokenizer.vocab_size == tokenizer.tokenizer.get_vocab_size()
    assert load_tokenizer(str(tokenizer_json.parent)).encode("the dog") == load_tokenizer(tokenizer.name).encode("the dog")


def test_a_tokenizer_without_special_tokens_gets_ids_of_its_own(tmp_path):
    hf = pytest.importorskip("tokenizers")
    plain = hf.Tokenizer(hf.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    plain.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    plain.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.eot_id, tokenizer.vocab_size, tokenizer.mask_token_id, tokenizer.special_ids) == (3, 4, 4, (3,))
    assert tokenizer.encode("b a zzz") == [1, 0, 2]
    assert tokenizer.decode([1, 3, 0]) == "b<|endoftext|>a"


def test_nanogpt_character_tables(tmp_path):
    path = tmp_path / "meta.pkl"
    characters = "\n abc"
    tables = {"vocab_size": 5, "itos": dict(enumerate(characters)), "stoi": {c: i for i, c in enumerate(characters)}}
    path.write_bytes(pickle.dumps(tables))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.decode(tokenizer.encode("cab a")) == "cab a"
    assert tokenizer.decode([2, 5, 99, -1]) == "a\ufffd\ufffd\ufffd"
    with pytest.raises(InputError, match="'xz' are not in the vocabulary"):
        tokenizer.encode("azx")


@pytest.mark.parametrize(
    "name, words", [("gtp2", "did you mean gpt2"), ("byte", "did you mean bytes"), ("./none/tokenizer.json", "no such file")]
)
def test_unknown_names_are_input_errors(name, words):
    with pytest.raises(InputError, match=words):
        load_tokenizer(name)


def test_a_model_name_without_a_network_is_an_input_error(execute):
    done = execute("-m", "data.prepare", "pydocs", "--tokenizer", "some/model", "--out", "/nonexistent/x", HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and done.stderr.startswith("error: tokenizer some/model:") and done.stderr.count("\n") == 1


def test_a_vocabulary_that_cannot_be_fetched_names_the_cache_variable(execute, tmp_path):
    """An empty cache and a proxy that nobody answers: what an offline machine sees."""
    source = tmp_path / "x.txt"
    source.write_text("text", encoding="utf-8")
    nowhere = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"), "HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = execute("-m", "data.prepare", source, "--out", tmp_path / "out", **nowhere)
    assert done.returncode == 2 and "TIKTOKEN_CACHE_DIR" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_damaged_tokenizer_json_is_an_input_error(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="tokenizer.json"):
        load_tokenizer(str(path))


def test_the_identity_follows_the_file(tmp_path, tokenizer_json):
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(tokenizer_json.read_bytes())
    first = tokenizer_identity(str(copy))
    assert first == tokenizer_identity(str(tmp_path)) and tokenizer_identity("gpt2") == "gpt2"
    copy.write_bytes(tokenizer_json.read_bytes() + b" ")
    assert tokenizer_identity(str(copy)) != first


def make_text(n: int) -> str:
    letters = random.Random(0)
    words = ["the", "fox's", "naïve", "42", "__init__", "...", "“why?”", "😀", "日本語", "a.b", "it'll", "/"]
    words += ["\n", "\n\n", "  ", "\t", "[x]\n", "_\n", "\r\n"]
    return " ".join(letters.choice(words) for _ in range(n))


@pytest.mark.parametrize("block", [7, 300, 10**9])
def test_pieces_have_the_tokens_of_the_whole(tokenizer, monkeypatch, block):
    monkeypatch.setattr(tokenizers, "PIECE", 100)
    text = make_text(3000)
    cut = list(pieces(text[at : at + block] for at in range(0, len(text), block)))
    assert "".join(cut) == text and len(cut) > 100 and max(map(len, cut)) < 300
    assert [i for piece in cut for i in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_text_without_a_boundary_stays_whole_and_empty_text_has_no_piece(monkeypatch):
    monkeypatch.setattr(tokenizers, "PIECE", 100)
    assert list(pieces(["a" * 250, "a" * 250])) == ["a" * 500]
    assert list(pieces([])) == list(pieces([""])) == list(pieces(["", ""])) == []


def test_a_megabyte_of_one_letter_or_of_spaces_is_encoded(gpt2):
    for letter in "a ":
        assert gpt2.decode(gpt2.encode(letter * 1_000_000)) == letter * 1_000_000


def test_byte_ids_are_the_bytes():
    text = make_text(100)
    assert bytes(ByteTokenizer().encode(text)) == text.encode("utf-8")


@pytest.mark.parametrize("name", ["gpt2", "p50k_base", "cl100k_base", "o200k_base"])
def test_no_cut_falls_inside_a_word_of_any_of_tiktokens_patterns(monkeypatch, name):
    """Byte pairs are merged within the words that an encoding's regular expression finds; the vocabularies would need a network."""
    import regex
    from tiktoken_ext import openai_public

    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(openai_public, loader, lambda *_, **__: {})
    words = regex.compile(getattr(openai_public, name)()["pat_str"])
    monkeypatch.setattr(tokenizers, "PIECE", 10)
    text = make_text(3000)
    cut = list(pieces([text]))
    assert len(cut) > 300 and [word for piece in cut for word in words.findall(piece)] == words.findall(text)
