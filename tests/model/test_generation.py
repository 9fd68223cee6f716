"""Sampling with and without the cache, windows beyond the block, restrictions of the choice, masks."""

import time

import pytest
import torch

from model import build_model
from model.generation import KeyValueCache, LayerCache, Sampling, choose, fill_masks, generate, window_start
from model.language_model import LanguageModel

CAUSAL = ["gpt2", "qwen2"]


@pytest.fixture
def language_model(model_config, plain_head, randomize):
    def build(name, words=90, **changes):
        torch.manual_seed(0)
        config = model_config(name, **changes)
        head = plain_head(config.n_embd, words, config.vocab_size)
        return randomize(LanguageModel(build_model(config), head), std=0.2).eval()

    return build


@pytest.mark.parametrize("name", CAUSAL)
def test_cached_hidden_states_equal_those_of_one_pass(language_model, name):
    backbone = language_model(name).backbone
    tokens = torch.randint(90, (3, 16))
    cache = KeyValueCache(backbone.n_layer, 16)
    parts = [backbone(tokens[:, :5], cache=cache), *(backbone(tokens[:, t : t + 1], cache=cache) for t in range(5, 16))]
    assert cache.length == 16
    torch.testing.assert_close(torch.cat(parts, dim=1), backbone(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("prompt_length", [1, 16, 21])
@pytest.mark.parametrize("sampling", [Sampling(40, temperature=0), Sampling(40, 3, 0.8, top_k=20, top_p=0.9, seed=4)])
def test_the_cache_changes_no_token_within_and_beyond_the_block(language_model, name, prompt_length, sampling):
    model, prompt = language_model(name), torch.randint(90, (prompt_length,))
    tokens = generate(model, prompt, sampling)
    assert tokens.shape == (sampling.num_samples, 40)
    assert torch.equal(tokens, generate(model, prompt, sampling, use_cache=False))
    assert len(tokens.unique()) > 1


def test_greedy_tokens_equal_transformers(model_config, plain_head, transformers_model):
    from model.hf_families import FAMILIES

    for name in CAUSAL:
        theirs = transformers_model(name)
        model = LanguageModel(build_model(model_config(name, intermediate_size=128)), plain_head(32, 96)).eval()
        model.backbone.load_state_dict(FAMILIES[name].take(theirs.state_dict(), model.backbone.state_dict()))
        prompt = torch.randint(96, (4,))
        expected = theirs.generate(prompt[None], max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 4:]
        assert torch.equal(generate(model, prompt, Sampling(12, temperature=0))[0], expected)


def test_a_seed_is_a_text(language_model):
    model, prompt = language_model("gpt2"), torch.tensor([3, 4])
    first, again, other = (generate(model, prompt, Sampling(12, 4, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) == 4


def test_rows_that_are_no_word_are_never_drawn(language_model):
    model = language_model("gpt2", words=5)
    assert generate(model, torch.tensor([1]), Sampling(200, 4, temperature=50.0)).max() < 5


def test_windows_hold_at_least_half_a_block_and_move_half_a_block_at_a_time():
    for block_size in (1, 2, 7, 16):
        starts = [window_start(length, block_size) for length in range(1, 100)]
        held = [length - start for length, start in zip(range(1, 100), starts, strict=True)]
        assert starts[:block_size] == [0] * block_size and starts == sorted(starts)
        assert max(held) == block_size and min(held[block_size:]) >= block_size - max(1, block_size // 2) + 1


def draws(log_probs, n=20_000, **options):
    chosen = choose(log_probs.expand(n, -1), Sampling(**options), torch.Generator().manual_seed(0))
    return torch.bincount(chosen, minlength=log_probs.numel()) / n


def test_the_frequencies_are_the_probabilities():
    log_probs = torch.tensor([0.5, 0.1, 0.3, 0.1]).log()
    torch.testing.assert_close(draws(log_probs), log_probs.exp(), atol=0.011, rtol=0)  # 3 sigma of 20,000 draws
    torch.testing.assert_close(draws(log_probs, temperature=0.5), torch.tensor([25, 1, 9, 1]) / 36, atol=0.011, rtol=0)
    torch.testing.assert_close(draws(log_probs, top_k=2), torch.tensor([0.625, 0, 0.375, 0]), atol=0.011, rtol=0)
    torch.testing.assert_close(draws(log_probs, top_p=0.75), torch.tensor([0.625, 0, 0.375, 0]), atol=0.011, rtol=0)
    torch.testing.assert_close(draws(log_probs, top_k=3, top_p=0.4), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(draws(log_probs, temperature=0), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(draws(log_probs, top_k=99), log_probs.exp(), atol=0.011, rtol=0)


@pytest.mark.parametrize(
    "wrong", [dict(max_new_tokens=0), dict(num_samples=0), dict(temperature=-1.0), dict(temperature=float("nan")), dict(top_k=0), dict(top_p=0.0)]
)
def test_a_value_out_of_range_is_named(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* is out of range"):
        Sampling(**wrong)


def test_prompts_and_backbones_that_cannot_be_continued(language_model):
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(language_model("gpt2"), torch.empty(0, dtype=torch.long), Sampling())
    with pytest.raises(ValueError, match="does not continue text"):
        generate(language_model("bert"), torch.tensor([1]), Sampling())
    with pytest.raises(ValueError, match="does not fill in masks"):
        fill_masks(language_model("gpt2"), torch.tensor([90]), 90, Sampling())
    with pytest.raises(ValueError, match="there is no mask"):
        fill_masks(language_model("bert"), torch.tensor([1]), 90, Sampling())


def test_several_tokens_cannot_follow_others_in_a_cache():
    cache = LayerCache(8)
    cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    with pytest.raises(ValueError, match="2 tokens at once cannot follow the 3"):
        cache.append(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4))


def test_one_mask_gets_its_most_probable_word(language_model):
    model = language_model("bert")
    tokens = torch.tensor([4, 90, 7, 8])
    filled = fill_masks(model, tokens, 90, Sampling(temperature=0))
    expected = model.head.log_probs(model.backbone(tokens[None]))[0, 1].argmax()
    assert filled.tolist() == [[4, expected.item(), 7, 8]]


def test_every_mask_is_filled_and_the_rest_stays(language_model):
    tokens = torch.tensor([90, 5, 90, 90, 6])
    filled = fill_masks(language_model("bert"), tokens, 90, Sampling(num_samples=3, temperature=2.0))
    assert filled.shape == (3, 5) and (filled < 90).all()
    assert (filled[:, [1, 4]] == torch.tensor([5, 6])).all()
    assert len({tuple(row) for row in filled.tolist()}) == 3


@pytest.mark.parametrize("name", CAUSAL)
def test_with_the_cache_each_token_passes_the_backbone_once_per_window(language_model, name):
    model, passed = language_model(name), []
    model.backbone.register_forward_pre_hook(lambda module, inputs: passed.append(inputs[0].size(1)))
    generate(model, torch.tensor([1, 2, 3]), Sampling(22, temperature=0))
    assert passed == [3] + [1] * 13 + [9] + [1] * 7  # full at 16, then half a block and the new token begin again


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_256_tokens_come_five_times_faster_with_the_cache(language_model, name):
    model = language_model(name, 4000, n_layer=6, n_head=4, n_embd=256, block_size=512, vocab_size=4096)
    prompt, sampling, seconds = torch.randint(4000, (200,)), Sampling(256, temperature=0), {}
    for use_cache in (True, False):
        generate(model, prompt, Sampling(2), use_cache)  # what the first call allocates is no part of the comparison
        start = time.process_time()
        generate(model, prompt, sampling, use_cache)
        seconds[use_cache] = time.process_time() - start
    assert seconds[False] / seconds[True] > 5
