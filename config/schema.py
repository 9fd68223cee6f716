"""Every setting of a run: its type, its default and what it means, written once.

A key is addressed as `section.key`, in a TOML file (`[section]`, `key = value`) as on the command line (`--section.key=value`).
None means unset: the default then follows from something this file cannot know (the dataset, the head, another key).
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Iterator, Literal

DISTANCES = "euclidean, manhattan, chebyshev, minkowski, cosine, hamming, canberra, bray_curtis, mahalanobis"


def key(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


def section(cls: type) -> Any:
    return field(default_factory=cls)


@dataclass(frozen=True)
class DataConfig:
    """What the model reads"""

    dataset: str = field(metadata={"help": "folder with train.bin and val.bin, as written by python -m data.prepare"})
    mask_fraction: float = key(0.15, "masked-LM models: share of the positions of a row that are predicted")
    mask_token_id: int | None = key(None, "masked-LM models: the id that stands for [MASK] (unset: the dataset's)")


@dataclass(frozen=True)
class ModelConfig:
    """The backbone: tokens in, hidden states out"""

    name: str = key("gpt2", "gpt2, bert (masked language model) or qwen2")
    n_layer: int = key(12, "number of transformer blocks")
    n_head: int = key(12, "attention heads per block; must divide n_embd")
    n_embd: int = key(768, "width of the hidden states and of the prototypes")
    block_size: int = key(1024, "context length in tokens")
    intermediate_size: int | None = key(None, "width inside the MLP (unset: the family's multiple of n_embd)")
    dropout: float = key(0.0, "share of activations dropped while training")
    bias: bool = key(True, "biases in linear layers and norms")
    tie_weights: bool = key(True, "the head's prototypes are the token embedding")
    vocab_size: int | None = key(None, "rows of the embedding (unset: the dataset's vocabulary and mask id, rounded up to a multiple of 64)")
    init_from: str | None = key(None, "start from these weights: a run folder of ours, or a transformers checkpoint (unset: from scratch)")
    num_key_value_heads: int | None = key(None, "qwen2: key/value heads shared by groups of n_head (unset: n_head)")
    rope_theta: float = key(1e6, "qwen2: base of the rotary position angles")
    rms_norm_eps: float = key(1e-6, "qwen2: added to the mean square in every norm")


@dataclass(frozen=True)
class HeadConfig:
    """The vocabulary head: hidden states in, probabilities of words out. Unset options are the head's own defaults"""

    name: str = key("cosine", f"linear (the cross-entropy baseline) or a distance: {DISTANCES}")
    link: Literal["harmonic", "gibbs"] | None = key(None, "harmonic: p ~ distance^-exponent; gibbs: p ~ exp(-distance / tau)")
    tau: float | None = key(None, "gibbs link: temperature")
    exponent: float | Literal["auto", "dim", "sqrt_dim"] | None = key(None, "a number, or auto (calibrated at step 0), dim (n_embd), sqrt_dim")
    exponent_spread: float | None = key(None, "exponent auto: standard deviation of the logits to aim at, in nats")
    learn_exponent: bool | None = key(None, "make the exponent a trained parameter")
    hidden_scale: float | Literal["auto"] | None = key(None, "factor on the hidden states before the distance")
    p: float | None = key(None, "minkowski: order of the norm, at least 1 (inf is allowed)")
    covariance: str | None = key(None, "mahalanobis: diagonal, cholesky or full")
    relaxation: str | None = key(None, "hamming: soft, hard or gumbel")
    temperature: float | None = key(None, "hamming: temperature of the binarisation")
    smooth: float | None = key(None, "chebyshev: sharpness of a smooth maximum (unset: the exact maximum)")
    min_denominator: float | None = key(None, "canberra: lower bound of each denominator")
    normalized: bool | None = key(None, "bray_curtis: compare rows divided by their sum of absolute values")
    bias: bool | None = key(None, "linear: one bias per word")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW"""

    learning_rate: float = key(6e-4, "peak learning rate")
    weight_decay: float = key(0.01, "decoupled decay of matrices (not of embeddings, prototypes, norms, biases)")
    beta1: float = key(0.9, "decay of the running mean of gradients")
    beta2: float = key(0.999, "decay of the running mean of squared gradients")


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate: linear warm-up, then a cosine"""

    decay_steps: int | None = key(None, "step at which the cosine ends (unset: train.max_steps)")
    warmup_steps: int | None = key(None, "steps of linear warm-up (unset: 5 % of decay_steps)")
    min_lr: float | None = key(None, "learning rate at the end of the cosine (unset: 1 % of the peak)")


@dataclass(frozen=True)
class TrainConfig:
    """The training loop"""

    max_steps: int = key(10000, "optimizer updates of the whole run")
    batch_size: int = key(16, "sequences per process and micro-step")
    gradient_accumulation_steps: int = key(1, "micro-steps per process and update")
    grad_clip: float = key(1.0, "largest gradient norm; longer gradients are shortened to it (0: off)")
    precision: Literal["float32", "bfloat16", "float16"] = key("float32", "float32, bfloat16 or float16")
    compile: bool = key(False, "torch.compile the model (where that fails: a warning, and training goes on without)")
    device: Literal["auto", "cpu", "cuda", "mps"] = key("auto", "auto (the best there is), cpu, cuda or mps")
    parallel: Literal["ddp", "fsdp"] = key("ddp", "how the processes of torchrun share the work: ddp (fsdp is not built yet)")
    checkpoint_interval: int = key(1000, "steps between checkpoints (one more at the end)")
    keep_last: int = key(2, "checkpoints kept beside the best one")
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass: slower, less memory")
    label_smoothing: float = key(0.0, "share of the target spread over the vocabulary, in the training loss only")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation while training"""

    interval: int = key(1000, "steps between evaluations (also at step 0 and at the end)")
    tokens: int = key(262144, "tokens of each split that are scored")
    batch_size: int | None = key(None, "sequences per process at a time; changes no result (unset: train.batch_size)")


@dataclass(frozen=True)
class EmissionsConfig:
    """Energy and emissions, measured with CodeCarbon"""

    enabled: bool = key(True, "measure them")
    interval_steps: int = key(1000, "steps per row of emissions.csv")
    country_iso_code: str | None = key(None, "three letters, such as FRA: whose electricity it is (unset: the world average, labelled so)")


@dataclass(frozen=True)
class LogConfig:
    """What is shown while training; the files of the run always hold every step"""

    interval: int = key(10, "steps between lines on the terminal and points in the trackers")
    tensorboard: bool = key(False, "also write TensorBoard files")
    wandb: bool = key(False, "also log to Weights & Biases")


@dataclass(frozen=True)
class Config:
    """The run"""

    data: DataConfig
    seed: int = key(1337, "every random draw of the run follows from it")
    out_dir: str | None = key(None, "run folder (unset: out/<name of the config file>)")
    model: ModelConfig = section(ModelConfig)
    head: HeadConfig = section(HeadConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    train: TrainConfig = section(TrainConfig)
    eval: EvalConfig = section(EvalConfig)
    emissions: EmissionsConfig = section(EmissionsConfig)
    log: LogConfig = section(LogConfig)


SECTIONS = {entry.name: entry.type for entry in fields(Config) if is_dataclass(entry.type)}
KEYS = {entry.name: entry for entry in fields(Config) if entry.name not in SECTIONS} | {
    f"{name}.{entry.name}": entry for name, cls in SECTIONS.items() for entry in fields(cls)
}  # "section.key" -> its dataclass field; the keys of the top come first, as they must in a TOML file

# What `--resume` may change: how long, how often, where and in which slices, but nothing that alters the sequence of updates.
# The product batch_size x gradient_accumulation_steps x processes has to stay what it was, which only the trainer can check.
MAY_CHANGE_ON_RESUME = frozenset(
    {
        "out_dir",  # the folder may have been moved
        "train.max_steps",
        "train.checkpoint_interval",
        "train.keep_last",
        "train.device",
        "train.batch_size",
        "train.gradient_accumulation_steps",
        "eval.interval",
        "eval.batch_size",  # changes no result, and follows train.batch_size where it is unset
        "emissions.interval_steps",
        "log.interval",
        "log.tensorboard",
        "log.wandb",
    }
)


def items(config: Config) -> Iterator[tuple[str, Any]]:
    """Yields ("section.key", value) for every key, in the order of the schema."""
    for name in KEYS:
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        yield name, value


def differences(a: Config, b: Config) -> list[str]:
    """The keys, as "section.key", whose values differ between two configs."""
    return [name for (name, x), (_, y) in zip(items(a), items(b), strict=True) if x != y]
