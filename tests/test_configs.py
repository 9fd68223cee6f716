"""Every file in config/ loads, resolves and builds (its shapes and rules, without memory for its weights)."""

import dataclasses
from pathlib import Path

import pytest
import torch

import heads
import runs
from config import load_config
from config.schema import DISTANCES, HeadConfig
from data.token_file import DatasetMeta
from model import BACKBONES
from model.initialization import initialize
from model.language_model import LanguageModel

FILES = sorted((Path(__file__).parent.parent / "config").glob("*.toml"))
GPT2_BPE = DatasetMeta(dtype="uint16", vocab_size=50257, max_id=50256, train_tokens=0, val_tokens=0, mask_token_id=50257)
BYTES = DatasetMeta(dtype="uint16", vocab_size=257, max_id=256, train_tokens=0, val_tokens=0, mask_token_id=257)


def built(path):
    config = load_config(path)
    config = runs.resolve(config, BYTES if config.data.dataset == "data/pydocs" else GPT2_BPE)
    with torch.device("meta"):
        backbone = BACKBONES[config.model.name](config.model)
        initialize(backbone, backbone.initializers())
        head = runs.build_vocabulary_head(config, GPT2_BPE if config.model.vocab_size > 50000 else BYTES)
        return config, LanguageModel(backbone, head, config.model.tie_weights)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_stands_alone(path):
    config, model = built(path)
    assert path.stem.startswith((config.model.name, "quickstart"))
    assert model.head.weight is model.backbone.token_embedding.weight
    assert path.read_text(encoding="utf-8").startswith("# ")


PUBLISHED = {  # parameters of the released models, and their rows; of the paper's 2B model only the round number is known
    "gpt2_small": (124_439_808, 50257),
    "gpt2_medium": (354_823_168, 50257),
    "gpt2_large": (774_030_080, 50257),
    "gpt2_xl": (1_557_611_200, 50257),
    "gpt2_2b": (2_080_507_328, 50257),
    "qwen2_0.5b": (494_032_768, 151936),
    "qwen2_1.5b": (1_543_714_304, 151936),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name):
    config, model = built(FILES[0].parent / f"{name}.toml")
    parameters, rows = PUBLISHED[name]
    assert sum(p.numel() for p in model.parameters()) == parameters + (config.model.vocab_size - rows) * config.model.n_embd


HEADS = ["", "_euclidean", "_manhattan", "_minkowski_2", "_cosine", "_cosine_gibbs_0.1", "_cosine_gibbs_0.5", "_cosine_gibbs_1.0"]
HEADS += ["_mahalanobis_diagonal", "_mahalanobis_cholesky", "_mahalanobis_full"]


@pytest.mark.parametrize(
    "family, published",
    [
        ("gpt2_small", dict(block_size=1024, dropout=0.1, learning_rate=2e-4, warmup_steps=500, batch_size=16, gradient_accumulation_steps=8)),
        ("bert_base", dict(block_size=512, dropout=0.1, learning_rate=1e-4, warmup_steps=1000, batch_size=38, gradient_accumulation_steps=2)),
        ("qwen2_0.5b", dict(block_size=1024, dropout=0.0, learning_rate=1e-4, warmup_steps=1000, batch_size=6, gradient_accumulation_steps=10)),
    ],
)
def test_every_cell_of_the_papers_grid_differs_in_the_head_alone(family, published):
    """arXiv 2603.10225, appendix C.2."""
    configs = [load_config(FILES[0].parent / f"{family}{head}.toml") for head in HEADS]
    assert len({config.head for config in configs}) == len(HEADS)
    for config in configs:
        sections = vars(config.model) | vars(config.optimizer) | vars(config.schedule) | vars(config.train)
        assert {key: sections[key] for key in published} == published
        assert (config.model, config.optimizer, config.schedule, config.train) == (
            configs[0].model, configs[0].optimizer, configs[0].schedule, configs[0].train,
        )  # fmt: skip
        assert (config.train.max_steps, config.train.grad_clip, config.eval.interval, config.optimizer.weight_decay) == (10000, 1.0, 1000, 0.01)


def test_the_config_has_a_key_for_every_option_of_every_head_and_its_help_names_them_all():
    keys = {field.name for field in dataclasses.fields(HeadConfig)} - {"name"}
    assert keys == {option for head in heads.HEADS.values() for option in head.defaults}
    assert DISTANCES.split(", ") == [name for name in heads.HEADS if name != "linear"]
