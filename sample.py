"""Text from a trained model: a causal one continues a prompt, a masked-LM one fills in every [MASK].

    python sample.py out/quickstart --prompt "The for statement"
    python sample.py out/bert --prompt "The [MASK] statement is used to"
"""

import argparse
import sys

import torch
from tqdm import tqdm

from commands import InputError, Parser, command
from data.tokenizers import load_tokenizer
from model.generation import Sampling, fill_masks, stream
from runs import Run, open_run
from training.distributed import choose_device

MASK = "[MASK]"
RULE = "-" * 40


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python sample.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--prompt", default="", help=f"text to continue (default: a new text), or text with {MASK} to fill in")
    parser.add_argument("--num-samples", type=int, default=1, help="how many (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="length of each continuation (default: 200); beyond block_size the "
                        "model sees the last half to whole block")  # fmt: skip
    parser.add_argument("--temperature", type=float, help="below 1 more predictable, above 1 less, 0 the most probable token only "
                        f"(default: 0.8; for {MASK}, 0 for one sample)")  # fmt: skip
    parser.add_argument("--top-k", type=int, help="choose among this many most probable tokens (default: all)")
    parser.add_argument("--top-p", type=float, help="choose among the most probable tokens that hold this probability (default: all)")
    parser.add_argument("--seed", type=int, default=1337, help="one seed, one text (default: 1337)")
    parser.add_argument("--checkpoint", metavar="last|best|STEP", default="last", help="which checkpoint (default: last)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    asked = parse(argv)
    run = open_run(asked.run, asked.checkpoint, choose_device(asked.device))
    if run.meta.tokenizer is None:
        raise InputError(f"{asked.run} does not say which tokenizer its ids belong to, so they cannot become text")
    tokenizer = load_tokenizer(run.meta.tokenizer)
    sample = continue_text if run.model.backbone.causal else fill_text
    sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead of failing
    try:
        for text in sample(run, tokenizer, asked):
            print(f"{text}\n{RULE}")
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error


def settings(asked: argparse.Namespace, temperature: float) -> Sampling:
    return Sampling(
        max_new_tokens=asked.max_new_tokens,
        num_samples=asked.num_samples,
        temperature=temperature if asked.temperature is None else asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=asked.seed,
    )


def continue_text(run: Run, tokenizer, asked: argparse.Namespace) -> list[str]:
    """The prompt and its continuations. Without a prompt a text begins where training texts do: after an end-of-text id."""
    ids = tokenizer.encode(asked.prompt) or ([] if run.meta.eot_id is None else [run.meta.eot_id])
    tokens = stream(run.model, on_device(ids, run, asked.prompt), settings(asked, temperature=0.8))
    new = torch.stack(list(tqdm(tokens, total=asked.max_new_tokens, unit="token", disable=None, leave=False)), dim=1)
    return [tokenizer.decode(tokenizer.encode(asked.prompt) + row) for row in new.tolist()]


def fill_text(run: Run, tokenizer, asked: argparse.Namespace) -> list[str]:
    """The prompt with every [MASK] filled in; one mask is one token."""
    mask_token_id = run.config.data.mask_token_id
    parts = asked.prompt.split(MASK)
    if len(parts) == 1:
        raise InputError(f"--prompt: a masked-LM model fills in {MASK}, and there is none in {asked.prompt!r}")
    if len(tokenizer.encode(" the")) == 1:  # words bring the space before them: the mask stands for it too
        parts = [part.removesuffix(" ") for part in parts[:-1]] + parts[-1:]
    ids = tokenizer.encode(parts[0])
    for part in parts[1:]:
        ids += [mask_token_id, *tokenizer.encode(part)]
    filled = fill_masks(
        run.model, on_device(ids, run, asked.prompt), mask_token_id, settings(asked, temperature=0.0 if asked.num_samples == 1 else 0.8)
    )
    return [tokenizer.decode(row) for row in filled.tolist()]


def on_device(ids: list[int], run: Run, prompt: str) -> torch.Tensor:
    """Token ids (T,) where the model is. Raises InputError for none, and for ids that it has no embedding of."""
    if not ids:
        raise InputError("--prompt is empty, and this run's texts have no id that begins one: give a prompt")
    embedding = run.model.backbone.token_embedding
    if max(ids) >= embedding.num_embeddings:
        raise InputError(f"--prompt {prompt!r} has the id {max(ids)}, the model {embedding.num_embeddings} rows: this is not its tokenizer")
    return torch.tensor(ids, device=embedding.weight.device)


if __name__ == "__main__":
    command(main)
