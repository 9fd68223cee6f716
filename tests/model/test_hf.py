"""Round trips with `transformers`, random weights, both directions, and the two commands as they are typed."""

import json
import re
import runpy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import InputError
from heads import build_head
from model import BACKBONES, build_model
from model.hf import main, read_checkpoint, write_checkpoint
from model.hf_families import FAMILIES
from model.language_model import LanguageModel
from runs import open_run

WORDS, ROWS = 90, 128  # ids that can be targets, rows of a padded vocabulary


@pytest.fixture
def run(model_config, randomize):
    """run(name, rows, head="linear", tied=True, **changes) -> what write_checkpoint takes, with random weights."""

    def build(name, rows=ROWS, head="linear", tied=True, words=None, **options):
        torch.manual_seed(0)
        words = words or min(rows, WORDS)
        config = model_config(name, vocab_size=rows, tie_weights=tied, dropout=0.1)
        options = {key: value for key, value in options.items() if not hasattr(config, key) or setattr(config, key, value)}
        model = LanguageModel(build_model(config), build_head(head, 32, words, rows, **options), tied)
        return SimpleNamespace(
            config=SimpleNamespace(model=config, head=SimpleNamespace(name=head), data=SimpleNamespace(mask_token_id=None)),
            meta=SimpleNamespace(vocab_size=words, eot_id=words - 1, mask_token_id=words, tokenizer=None),
            model=randomize(model).eval(),
        )

    return build


def automodel(name, folder):
    import transformers

    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model, about = auto.from_pretrained(folder, output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"] and not about["mismatched_keys"]
    return model.eval()


def log_probs(run, tokens):
    return run.model.head.log_probs(run.model.backbone(tokens))[..., : run.meta.vocab_size]


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("rows", [WORDS + 1, ROWS])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reproduces_a_linear_run(run, tmp_path, name, rows, tied):
    ours = run(name, rows, tied=tied, words=WORDS)
    assert "softmax head" in write_checkpoint(ours, tmp_path / "export")
    theirs = automodel(name, tmp_path / "export")
    for length in (1, 16):
        tokens = torch.randint(WORDS, (3, length))
        expected = theirs(tokens).logits.log_softmax(-1)
        assert expected.size(-1) == (rows if name == "bert" else WORDS)
        assert expected[..., WORDS:].exp().eq(0).all()
        torch.testing.assert_close(log_probs(ours, tokens), expected[..., :WORDS], atol=1e-4, rtol=0)


def test_a_run_without_biases_is_one_with_zeros_there(run, tmp_path):
    for name in BACKBONES:
        ours = run(name, bias=False)
        write_checkpoint(ours, tmp_path / name)
        tokens = torch.randint(WORDS, (2, 16))
        expected = automodel(name, tmp_path / name)(tokens).logits.log_softmax(-1)[..., :WORDS]
        torch.testing.assert_close(log_probs(ours, tokens), expected, atol=1e-4, rtol=0)


def test_right_padded_batches_agree(run, tmp_path):
    ours = run("bert")
    write_checkpoint(ours, tmp_path / "export")
    tokens, mask = torch.randint(WORDS, (3, 16)), torch.arange(16) < torch.tensor([[16], [9], [1]])
    expected = automodel("bert", tmp_path / "export")(tokens, attention_mask=mask.long()).logits.log_softmax(-1)[..., :WORDS]
    actual = ours.model.head.log_probs(ours.model.backbone(tokens, attention_mask=mask))[..., :WORDS]
    torch.testing.assert_close(actual[mask], expected[mask], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", BACKBONES)
def test_gradients_of_one_step_agree(run, tmp_path, name):
    ours = run(name, words=ROWS, rows=ROWS)
    write_checkpoint(ours, tmp_path / "export")
    theirs = automodel(name, tmp_path / "export")
    tokens, targets = torch.randint(ROWS, (3, 16)), torch.randint(ROWS, (3, 16))
    loss, count = ours.model(tokens, targets)
    (loss / count).backward()
    torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten()).backward()
    gradients = FAMILIES[name].give({key: parameter.grad for key, parameter in ours.model.backbone.named_parameters()})
    compared = {key: parameter.grad for key, parameter in theirs.named_parameters() if key in gradients}
    assert compared.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, compared[key], atol=1e-6, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("tied", [True, False])
def test_import_reproduces_transformers(transformers_model, tmp_path, name, tied):
    theirs = transformers_model(name, tied=tied)
    theirs.save_pretrained(tmp_path / "theirs")
    main(["import", str(tmp_path / "theirs"), str(tmp_path / "run")])
    ours = open_run(tmp_path / "run")
    assert ours.config.model.name == name and ours.config.model.tie_weights == tied and ours.step == 0
    for length in (1, 16):
        tokens = torch.randint(96, (3, length))
        torch.testing.assert_close(log_probs(ours, tokens), theirs(tokens).logits.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_there_and_back_is_the_same_model(run, tmp_path, name, head):
    ours = run(name, head=head, tied=name != "qwen2")
    write_checkpoint(ours, tmp_path / "export")
    main(["import", str(tmp_path / "export"), str(tmp_path / "run")])
    again = open_run(tmp_path / "run")
    assert again.meta.vocab_size == WORDS and again.config.head.name == head
    tokens = torch.randint(WORDS, (3, 16))
    torch.testing.assert_close(log_probs(again, tokens), log_probs(ours, tokens), atol=1e-5, rtol=0)


def test_the_tokenizer_comes_along(run, tmp_path):
    ours = run("gpt2", rows=320, words=257)
    ours.meta.tokenizer = "bytes"
    write_checkpoint(ours, tmp_path / "export")
    main(["import", str(tmp_path / "export"), str(tmp_path / "run")])
    meta = open_run(tmp_path / "run").meta
    assert (meta.tokenizer, meta.vocab_size, meta.eot_id) == ("bytes", 257, 256)
    config = json.loads((tmp_path / "export/config.json").read_text(encoding="utf-8"))
    foreign = {key: value for key, value in config.items() if key not in ("target_vocab_size", "tokenizer_name", "eos_token_id")}
    (tmp_path / "export/config.json").write_text(json.dumps(foreign), encoding="utf-8")
    assert open_run(imported(tmp_path / "export", tmp_path / "unknown")).meta.tokenizer is None
    meta = open_run(imported(tmp_path / "export", tmp_path / "named", "--tokenizer", "bytes")).meta
    assert (meta.tokenizer, meta.vocab_size, meta.eot_id) == ("bytes", 257, 256)
    with pytest.raises(InputError, match="tokenizer bytes has 257 ids, the checkpoint 90 rows"):
        write_checkpoint(run("gpt2"), tmp_path / "small")
        imported(tmp_path / "small", tmp_path / "wrong", "--tokenizer", "bytes")


def imported(source, target, *flags):
    main(["import", str(source), str(target), *flags])
    return target


def test_both_spellings_of_the_rotary_base_are_read(transformers_model, tmp_path):
    theirs = transformers_model("qwen2")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for spelling in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}):
        kept = {key: value for key, value in config.items() if not key.startswith("rope")}
        (tmp_path / "config.json").write_text(json.dumps(kept | spelling), encoding="utf-8")
        assert read_checkpoint(tmp_path)[0]["rope_theta"] == 5e5
    (tmp_path / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    assert read_checkpoint(tmp_path)[0]["rope_theta"] == 1e4  # transformers' default


def test_files_of_a_bare_backbone_and_in_pieces_are_read(transformers_model, tmp_path):
    theirs = transformers_model("gpt2")
    theirs.transformer.save_pretrained(tmp_path / "bare")  # names without `transformer.`, as on the hub
    theirs.save_pretrained(tmp_path / "pieces", max_shard_size="40KB")
    theirs.save_pretrained(tmp_path / "whole")
    assert len(list((tmp_path / "pieces").glob("*.safetensors"))) > 1
    expected = read_checkpoint(tmp_path / "whole")[2]
    for folder in ("bare", "pieces"):
        state = read_checkpoint(tmp_path / folder)[2]
        assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)


def test_the_old_names_of_berts_norms_are_read(transformers_model, tmp_path):
    transformers_model("bert").save_pretrained(tmp_path)
    expected = read_checkpoint(tmp_path)[2]
    tensors = load_file(tmp_path / "model.safetensors")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t for name, t in tensors.items()}
    save_file(old | {"bert.pooler.dense.bias": torch.zeros(32), "cls.seq_relationship.bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    state = read_checkpoint(tmp_path)[2]
    assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("head", ["cosine", "euclidean"])
def test_the_readme_of_a_distance_heads_export_joins_backbone_and_head(run, tmp_path, name, head):
    ours = run(name, head=head, exponent=7.0)
    folder = tmp_path / "export"
    assert head in write_checkpoint(ours, folder)
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    tokens = torch.randint(WORDS, (2, 16))
    (tmp_path / "lines.py").write_text(code, encoding="utf-8")
    found = runpy.run_path(str(tmp_path / "lines.py"), {"folder": str(folder), "tokens": tokens})["log_probs"]
    torch.testing.assert_close(found[..., :WORDS], log_probs(ours, tokens), atol=1e-4, rtol=1e-4)
    assert found[..., WORDS:].eq(-torch.inf).all()


@pytest.mark.parametrize("name", BACKBONES)
def test_a_distance_head_is_never_taken_for_a_linear_one(run, tmp_path, name):
    import transformers

    write_checkpoint(run(name, head="cosine"), tmp_path / "export")
    config = json.loads((tmp_path / "export/config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == [FAMILIES[name].backbone_class] and config["tie_word_embeddings"] is False
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    missing = auto.from_pretrained(tmp_path / "export", output_loading_info=True)[1]["missing_keys"]
    assert FAMILIES[name].head["weight"] in missing  # transformers says that it has no such head, and does not tie one


def test_a_linear_head_with_a_bias_that_gpt2_has_no_place_for_goes_beside(run, tmp_path):
    ours = run("gpt2")
    ours.model.head = build_head("linear", 32, WORDS, ROWS, bias=True)
    ours.model.head.weight = ours.model.backbone.token_embedding.weight
    assert "GPT2Model" in write_checkpoint(ours, tmp_path / "export")
    assert (tmp_path / "export/head.json").is_file()


def test_a_folder_in_use_is_left_alone(run, tmp_path):
    (tmp_path / "mine.txt").write_text("keep", encoding="utf-8")
    with pytest.raises(InputError, match="is not empty"):
        write_checkpoint(run("gpt2"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu' is not supported"),
        ("gpt2", {"model_type": "llama"}, "model_type = 'llama' is none of gpt2, bert, qwen2"),
        ("gpt2", {"n_layer": 3}, r"lacks transformer.h.2"),
        ("gpt2", {"n_layer": 1}, r"holds unknown transformer.h.1"),
        ("gpt2", {"n_layer": None}, "n_layer must be a whole number"),
        ("gpt2", {"n_head": 5}, "n_embd=32 is not divisible by n_head=5"),
        ("bert", {"type_vocab_size": 3}, "type_vocab_size = 3"),
        ("qwen2", {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2", {"tie_word_embeddings": False}, "lacks lm_head.weight"),
    ],
)
def test_a_checkpoint_that_is_not_ours_to_read_is_refused_by_name(transformers_model, tmp_path, name, change, message):
    transformers_model(name).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        main(["import", str(tmp_path / "theirs"), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_folders_that_hold_no_checkpoint(transformers_model, tmp_path):
    with pytest.raises(InputError, match="config.json is missing"):
        read_checkpoint(tmp_path)
    transformers_model("gpt2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(InputError, match="cannot read .*model.safetensors"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no model.safetensors"):
        read_checkpoint(tmp_path)


def test_commands_in_real_processes(run, tmp_path, execute):
    """Import, export, and the export opened: as typed, each in a process of its own."""
    write_checkpoint(run("gpt2"), tmp_path / "first")
    done = execute("-m", "model.hf", "import", str(tmp_path / "first"), str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    done = execute("-m", "model.hf", "export", str(tmp_path / "run"), str(tmp_path / "second"))
    assert done.returncode == 0, done.stderr
    assert "GPT2LMHeadModel" in done.stdout
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_exporting_what_is_no_run(tmp_path):
    with pytest.raises(InputError, match="nowhere is not a run folder"):
        main(["export", str(tmp_path / "nowhere"), str(tmp_path / "export")])
    assert not (tmp_path / "export").exists()
    with pytest.raises(InputError, match="required: RUN"):
        main(["import", "gpt2"])
