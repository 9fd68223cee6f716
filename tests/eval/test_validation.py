import json
import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

import eval.validation
from config.schema import ModelConfig
from data.loader import Batch, BatchShape, validation_batches
from data.masking import Masking
from data.token_file import open_dataset
from eval.validation import mean_nll, perplexity, score, validate
from heads import HEADS, build_head
from model import build_model
from model.language_model import LanguageModel

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from commands import leave
from config.schema import ModelConfig
from data.loader import BatchShape, validation_batches
from data.token_file import open_dataset
from eval.validation import mean_nll, validate
from heads import build_head
from model import build_model
from model.language_model import LanguageModel
from training.record import strict_json

dist.init_process_group("gloo")
head = build_head("cosine", n_embd=24, vocab_size=257, padded_vocab_size=320, exponent=20.0)
model = LanguageModel(build_model(ModelConfig(n_layer=2, n_head=2, n_embd=24, block_size=16, vocab_size=320)), head)
model.load_state_dict(torch.load(sys.argv[2], weights_only=True))
shape = BatchShape(16, int(sys.argv[3]), 1, dist.get_rank(), dist.get_world_size())
read = lambda: validation_batches(open_dataset(sys.argv[1]).val, shape, 500)
results = validate(model, read(), dist.all_reduce) | {"mean_nll": mean_nll(model, read(), dist.all_reduce)}
print("RESULT" + strict_json(results) + "END")
dist.destroy_process_group()
leave(0)
"""


def language_model(head="linear", name="gpt2", dropout=0.1, seed=0, **options):
    """A random model over 257 words in 320 rows, with logits far from uniform."""
    torch.manual_seed(seed)
    config = ModelConfig(name=name, n_layer=2, n_head=2, n_embd=24, block_size=16, dropout=dropout, vocab_size=320)
    options = {} if head == "linear" else {"exponent": 20.0} | options
    model = LanguageModel(build_model(config), build_head(head, n_embd=24, vocab_size=257, padded_vocab_size=320, **options))
    with torch.no_grad():
        model.head.weight.mul_(20)
    return model


@pytest.fixture
def val(corpus):
    return open_dataset(corpus).val


def windows(val, batch_size, limit=500, **more):
    """500 targets in windows of 16: 31 full ones and a tail of 4."""
    return validation_batches(val, BatchShape(16, batch_size, **more), limit)


def test_a_uniform_predictor_has_nll_ln_v_exactly(val):
    model = language_model()
    with torch.no_grad():
        model.head.weight.zero_()  # tied: the hidden states are equal too, and have no spectrum
    results = validate(model, windows(val, 4))
    assert results["val_nll"] == pytest.approx(math.log(257), rel=1e-6)  # over the words, not over the padded rows
    assert results["val_perplexity"] == pytest.approx(257, rel=1e-5)


@pytest.mark.parametrize("head", ["linear", "euclidean", "cosine"])
def test_equals_float64_of_the_definitions_on_the_stored_arrays(val, head):
    model = language_model(head)
    results = validate(model, windows(val, 4))
    tokens = torch.from_numpy(val[:501])
    model.eval()
    rows = [(tokens[start : min(start + 16, 500)], tokens[start + 1 : min(start + 17, 501)]) for start in range(0, 500, 16)]
    with torch.no_grad():
        hidden = [model.backbone(inputs[None])[0].double().numpy() for inputs, _ in rows]
    targets = np.concatenate([targets.numpy() for _, targets in rows])
    log_probs = oracle(head, np.concatenate(hidden), model.head.weight[:257].detach().double().numpy())
    assert results["n_positions"] == results["n_tokens"] == len(targets) == 500
    assert results["val_nll"] == pytest.approx(-log_probs[np.arange(500), targets].mean(), rel=1e-5)
    assert results["val_accuracy"] == (log_probs.argmax(1) == targets).mean()
    full = np.concatenate(hidden[:-1])  # without the tail
    assert results["effective_rank"] == pytest.approx(effective_rank_of(full), rel=1e-6)
    last = np.stack([states[-1] for states in hidden[:-1]])
    values = np.linalg.eigvalsh(np.cov(last, rowvar=False))[::-1]
    assert results["pca5"] == pytest.approx(values[:5].sum() / values.sum(), rel=1e-6)
    assert results["pc2_ev"] == pytest.approx(values[:2].sum() / values.sum(), rel=1e-6)
    assert results["pca90"] == 1 + np.argmax(np.cumsum(values) / values.sum() >= 0.9)
    assert results["n_pca"] == 31 and results["n_effective_rank"] == 496 and results["pca_few"] and not results["effective_rank_few"]


def oracle(head, h, w):
    if head == "linear":
        return log_softmax(h @ w.T, axis=1)
    if head == "euclidean":
        distances = np.linalg.norm(h[:, None] - w[None], axis=2)
    else:
        distances = 1 - (h @ w.T) / np.linalg.norm(h, axis=1)[:, None] / np.linalg.norm(w, axis=1)
    return log_softmax(-20.0 * np.log(distances), axis=1)


def effective_rank_of(vectors):
    values = np.linalg.eigvalsh(np.cov(vectors, rowvar=False))
    shares = values[values > 0] / values.sum()
    return np.exp(-(shares * np.log(shares)).sum())


@pytest.mark.parametrize("batch_size", [3, 8, 64])
def test_the_batch_size_changes_nothing(val, batch_size):
    model = language_model("cosine")
    assert_same(validate(model, windows(val, batch_size)), validate(model, windows(val, 1)))


def test_chunks_of_positions_change_nothing(val, monkeypatch):
    model = language_model("cosine")
    whole = validate(model, windows(val, 8))
    monkeypatch.setitem(eval.validation.LOG_PROBS_AT_ONCE, "cpu", 320 * 7)
    assert_same(validate(model, windows(val, 8)), whole)


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for key, value in expected.items():
        assert results[key] == pytest.approx(value, rel=1e-6), key


@pytest.mark.parametrize("processes, batch_size", [(2, 3), pytest.param(3, 40, marks=pytest.mark.slow)])
def test_several_processes_give_one_process_result(val, corpus, tmp_path, execute, processes, batch_size):
    model = language_model("cosine")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        tmp_path / "script.py",
        corpus,
        tmp_path / "model.pt",
    ]
    done = execute(*command, batch_size, PYTHONPATH=".")
    assert done.returncode == 0, done.stderr
    found = [json.loads(part.partition("END")[0]) for part in done.stdout.split("RESULT")[1:]]
    assert len(found) == processes
    alone = validate(model, windows(val, 8)) | {"mean_nll": mean_nll(model, windows(val, 8))}
    for results in found:
        assert_same(results, alone)


@pytest.mark.parametrize("head", HEADS)
def test_mean_nll_is_the_same_measure_for_every_head(val, head):
    model = language_model(head)
    assert mean_nll(model, windows(val, 5)) == pytest.approx(validate(model, windows(val, 4))["val_nll"], rel=1e-6)


def test_masked_models_are_scored_on_masked_positions_only(corpus):
    dataset = open_dataset(corpus)
    model = language_model(name="bert")
    masking = Masking.for_dataset(dataset.meta, 0.15, dataset.meta.mask_token_id)
    results = [validate(model, validation_batches(dataset.val, BatchShape(16, size), 500, masking)) for size in (1, 7)]
    assert_same(results[1], results[0])
    batches = list(validation_batches(dataset.val, BatchShape(16, 4), 500, masking))
    assert results[0]["n_positions"] == sum(len(batch.targets) for batch in batches) < 100
    assert results[0]["n_tokens"] == 500
    tail = len(batches[-1].targets)  # of the last, shorter window
    assert results[0]["n_pca"] == results[0]["n_effective_rank"] == results[0]["n_positions"] - tail
    assert results[0]["pca5"] == results[0]["pca5_every_position"]


def test_modes_come_back_and_no_random_number_is_drawn(val):
    model = language_model(dropout=0.5)
    model.train()
    model.backbone.h[0].eval()  # somebody froze a block
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first, second = (validate(model, windows(val, 4)) for _ in range(2))
    mean_nll(model, windows(val, 4))
    assert first == second  # dropout is off
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_modes_come_back_after_an_error(val):
    model = language_model()
    model.train()
    with pytest.raises(RuntimeError, match="out of bounds"):
        validate(model, [Batch(torch.zeros(1, 16, dtype=torch.long), torch.full((1, 16), 1000), None)])
    assert model.training and model.backbone.training


def test_under_bfloat16_autocast(val):
    model = language_model("cosine")
    exact = validate(model, windows(val, 4))["val_nll"]
    rounded = validate(model, windows(val, 4), autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert rounded["val_nll"] == pytest.approx(exact, rel=2e-2)
    assert rounded["val_nll"] != exact


def test_a_broken_model_is_reported_as_such(val):
    model = language_model()
    with torch.no_grad():
        model.backbone.ln_f.weight.fill_(math.nan)
    results = validate(model, windows(val, 4))
    assert math.isnan(results["val_nll"]) and math.isnan(results["val_perplexity"])
    assert results["effective_rank"] is results["pca5"] is None


def test_nothing_to_score_is_none():
    results = validate(language_model(), [])
    assert results["val_nll"] is results["val_perplexity"] is results["val_accuracy"] is results["effective_rank"] is None
    assert mean_nll(language_model(), []) is None


def test_states_are_kept_up_to_a_number(val):
    model = language_model()
    scores = score(model, windows(val, 4), keep_states=10)
    assert scores.states.shape == (10, 24)
    with torch.no_grad():
        expected = model.eval().backbone(torch.from_numpy(val[:16])[None])[0, -1]
    torch.testing.assert_close(scores.states[0], expected)


def test_perplexity_is_infinite_only_when_it_overflows():
    assert perplexity(2.0) == pytest.approx(math.exp(2))
    assert perplexity(709.0) < math.inf
    assert perplexity(710.0) == math.inf
    assert math.isnan(perplexity(math.nan)) and perplexity(None) is None
