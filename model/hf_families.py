"""How `transformers` names and configures what our backbones compute: one entry per family, both directions."""

import re
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from commands import InputError

BERT_UNTIED_BIAS = "cls.predictions.decoder.bias"  # a second name of cls.predictions.bias, and the one in use where weights are not tied


class Family(NamedTuple):
    """One architecture as `transformers` knows it. Patterns match whole names of ours, without `backbone.`."""

    backbone_class: str  # what AutoModel loads
    language_model_class: str
    prefix: str  # of the backbone's tensors inside the language model
    head: dict[str, str]  # the linear head's tensors -> theirs
    embedding: str  # ours: one row per id
    positions: str | None  # ours: one row per position; None where positions are not learned
    names: dict[str, str]  # our module -> theirs, * for the layer's number; empty: the same names
    biased: str  # modules that always have a bias there
    transposed: str  # matrices stored as (in, out) there
    ignored: str  # their tensors that hold nothing to learn, or belong to parts that a backbone does not have
    read: Callable[[dict], dict]  # their config.json -> our [model] keys
    write: Callable[[object, int], dict]  # our [model] section and the width inside the MLP -> their config.json

    def their_name(self, name: str) -> str:
        """`name` of ours (without `backbone.`) as it stands in a language model's file."""
        module, _, kind = name.rpartition(".")
        number = re.search(r"\.(\d+)\.", name)
        if not self.names:
            return f"{self.prefix}{name}"
        theirs = self.names[re.sub(r"\.\d+\.", ".*.", module)]
        return f"{theirs.replace('*', number[1]) if number else theirs}.{kind}"

    def take(self, theirs: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors for every name in `wanted` (ours), in float32 and our orientation. Raises InputError naming what is missing or left over."""
        theirs = {self._current_name(name): tensor for name, tensor in theirs.items() if not re.fullmatch(self.ignored, name)}
        names = {name: self.their_name(name) for name in wanted}
        missing = sorted(their for their in names.values() if their not in theirs)
        unknown = sorted(theirs.keys() - set(names.values()) - set(self.head.values()) - {BERT_UNTIED_BIAS})
        for what, which in (("lacks", missing), ("holds unknown", unknown)):
            if which:
                raise InputError(f"the checkpoint {what} {', '.join(which[:4])}{' ...' if len(which) > 4 else ''}")
        turned = {name: theirs[their].T if re.fullmatch(self.transposed, name) else theirs[their] for name, their in names.items()}
        return {name: tensor.float().contiguous() for name, tensor in turned.items()}

    def give(self, ours: dict[str, Tensor]) -> dict[str, Tensor]:
        """A language model's tensors, of a backbone's state dict. Biases that ours can do without are zeros there."""
        complete = dict(ours)
        for name, tensor in ours.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and re.fullmatch(self.biased, module) and f"{module}.bias" not in ours:
                complete[f"{module}.bias"] = tensor.new_zeros(tensor.size(0))
        turned = {name: tensor.T if re.fullmatch(self.transposed, name) else tensor for name, tensor in complete.items()}
        return {self.their_name(name): tensor.float().contiguous() for name, tensor in turned.items()}

    def _current_name(self, name: str) -> str:
        """Files of a bare backbone have no prefix; BERT's first ones say gamma and beta."""
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        return name if name.startswith((self.prefix, "lm_head.", "cls.")) else self.prefix + name


def require(theirs: dict, **allowed: tuple) -> None:
    """Raises InputError if a setting that our backbones fix has another value. The first allowed one is the default."""
    for key, values in allowed.items():
        value = theirs.get(key, values[0])
        if value not in values:
            raise InputError(f"config.json: {key} = {value!r} is not supported, only {' or '.join(map(repr, values))}")


def number(theirs: dict, key: str) -> int:
    if not isinstance(theirs.get(key), int):
        raise InputError(f"config.json: {key} must be a whole number, not {theirs.get(key)!r}")
    return theirs[key]


def read_gpt2(theirs: dict) -> dict:
    require(theirs, activation_function=("gelu_new", "gelu_pytorch_tanh"), layer_norm_epsilon=(1e-5,), scale_attn_weights=(True,))
    require(theirs, scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))
    return dict(
        n_layer=number(theirs, "n_layer"), n_head=number(theirs, "n_head"), n_embd=number(theirs, "n_embd"),
        block_size=number(theirs, "n_positions"), vocab_size=number(theirs, "vocab_size"), intermediate_size=theirs.get("n_inner"),
        dropout=theirs.get("resid_pdrop", 0.1), tie_weights=theirs.get("tie_word_embeddings", True),
    )  # fmt: skip


def write_gpt2(model, width: int) -> dict:
    return dict(
        n_layer=model.n_layer, n_head=model.n_head, n_embd=model.n_embd, n_positions=model.block_size, n_inner=width,
        activation_function="gelu_new", layer_norm_epsilon=1e-5,
        resid_pdrop=model.dropout, embd_pdrop=model.dropout, attn_pdrop=model.dropout,
    )  # fmt: skip


def read_bert(theirs: dict) -> dict:
    require(theirs, hidden_act=("gelu",), layer_norm_eps=(1e-12,), type_vocab_size=(2,), position_embedding_type=("absolute",))
    require(theirs, is_decoder=(False,), add_cross_attention=(False,))
    return dict(
        n_layer=number(theirs, "num_hidden_layers"), n_head=number(theirs, "num_attention_heads"), n_embd=number(theirs, "hidden_size"),
        block_size=number(theirs, "max_position_embeddings"), vocab_size=number(theirs, "vocab_size"),
        intermediate_size=number(theirs, "intermediate_size"),
        dropout=theirs.get("hidden_dropout_prob", 0.1), tie_weights=theirs.get("tie_word_embeddings", True),
    )  # fmt: skip


def write_bert(model, width: int) -> dict:
    return dict(
        num_hidden_layers=model.n_layer, num_attention_heads=model.n_head, hidden_size=model.n_embd,
        max_position_embeddings=model.block_size, intermediate_size=width,
        hidden_act="gelu", layer_norm_eps=1e-12, type_vocab_size=2, pad_token_id=None,
        hidden_dropout_prob=model.dropout, attention_probs_dropout_prob=model.dropout,
    )  # fmt: skip


def read_qwen2(theirs: dict) -> dict:
    require(theirs, hidden_act=("silu",), use_sliding_window=(False,), rope_scaling=(None,))
    rope = theirs.get("rope_parameters") or {}  # transformers 5; until 4 the base stood at the top
    require(rope, rope_type=("default",))
    n_head, n_embd = number(theirs, "num_attention_heads"), number(theirs, "hidden_size")
    require(theirs, head_dim=(n_embd // n_head, None))
    return dict(
        n_layer=number(theirs, "num_hidden_layers"), n_head=n_head, n_embd=n_embd,
        num_key_value_heads=theirs.get("num_key_value_heads") or n_head,
        block_size=number(theirs, "max_position_embeddings"), vocab_size=number(theirs, "vocab_size"),
        intermediate_size=number(theirs, "intermediate_size"),
        rope_theta=float(rope.get("rope_theta", theirs.get("rope_theta", 10000.0))), rms_norm_eps=theirs.get("rms_norm_eps", 1e-6),
        dropout=theirs.get("attention_dropout", 0.0), tie_weights=theirs.get("tie_word_embeddings", False),
    )  # fmt: skip


def write_qwen2(model, width: int) -> dict:
    return dict(
        num_hidden_layers=model.n_layer, num_attention_heads=model.n_head, hidden_size=model.n_embd,
        num_key_value_heads=model.num_key_value_heads or model.n_head, max_position_embeddings=model.block_size,
        intermediate_size=width,
        rope_theta=model.rope_theta, rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},  # both spellings
        rms_norm_eps=model.rms_norm_eps, hidden_act="silu", attention_dropout=model.dropout, use_sliding_window=False,
    )  # fmt: skip


NOTHING = "(?!)"  # a pattern that matches nothing

FAMILIES = {
    "gpt2": Family(
        backbone_class="GPT2Model", language_model_class="GPT2LMHeadModel", prefix="transformer.",
        head={"weight": "lm_head.weight"}, embedding="wte.weight", positions="wpe.weight", names={},
        biased=r"h\..*|ln_f", transposed=r"h\..*\.(c_attn|c_proj|c_fc)\.weight",
        ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask, once stored as a buffer
        read=read_gpt2, write=write_gpt2,
    ),
    "bert": Family(
        backbone_class="BertModel", language_model_class="BertForMaskedLM", prefix="bert.",
        head={"weight": "cls.predictions.decoder.weight", "bias": "cls.predictions.bias"},
        embedding="word_embedding.weight", positions="position_embedding.weight",
        names={
            "word_embedding": "bert.embeddings.word_embeddings",
            "position_embedding": "bert.embeddings.position_embeddings",
            "segment_embedding": "bert.embeddings.token_type_embeddings",
            "embedding_norm": "bert.embeddings.LayerNorm",
            "layers.*.attention.query": "bert.encoder.layer.*.attention.self.query",
            "layers.*.attention.key": "bert.encoder.layer.*.attention.self.key",
            "layers.*.attention.value": "bert.encoder.layer.*.attention.self.value",
            "layers.*.attention.output": "bert.encoder.layer.*.attention.output.dense",
            "layers.*.attention_norm": "bert.encoder.layer.*.attention.output.LayerNorm",
            "layers.*.mlp.up": "bert.encoder.layer.*.intermediate.dense",
            "layers.*.mlp.down": "bert.encoder.layer.*.output.dense",
            "layers.*.mlp_norm": "bert.encoder.layer.*.output.LayerNorm",
            "transform.dense": "cls.predictions.transform.dense",
            "transform.norm": "cls.predictions.transform.LayerNorm",
        },
        biased=r"embedding_norm|layers\..*|transform\..*", transposed=NOTHING,
        ignored=r"(bert\.)?embeddings\.position_ids|(bert\.)?pooler\..*|cls\.seq_relationship\..*",
        read=read_bert, write=write_bert,
    ),
    "qwen2": Family(
        backbone_class="Qwen2Model", language_model_class="Qwen2ForCausalLM", prefix="model.",
        head={"weight": "lm_head.weight"}, embedding="embed_tokens.weight", positions=None, names={},
        biased=r"layers\.\d+\.self_attn\.[qkv]_proj", transposed=NOTHING,
        ignored=r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
        read=read_qwen2, write=write_qwen2,
    ),
}  # fmt: skip


def family_of(config: dict) -> str:
    """Our name of the architecture in a config.json. Raises InputError for one that we do not have."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise InputError(f"config.json: model_type = {name!r} is none of {', '.join(FAMILIES)}")
    return name
