"""Fixtures that several rooms share: a small corpus of real English, a config for it, and commands as real processes."""

import json
import os
import pydoc_data.topics
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent

TINY_CONFIG = """
seed = 7
[data]
dataset = "{dataset}"
[model]
n_layer = 2
n_head = 2
n_embd = 32
block_size = 32
[head]
name = "linear"
[optimizer]
learning_rate = 3e-3
[train]
max_steps = 6
batch_size = 8
checkpoint_interval = 100
device = "cpu"
[eval]
interval = 100
tokens = 512
[emissions]
enabled = false
"""


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Sums of floats do not depend on how many cores the machine has to spare."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """A background job ignores SIGINT, and its children would inherit that: the processes started here must not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A prepared dataset folder: 60 articles of Python's language reference as bytes."""
    from data.prepare import main as prepare

    folder = tmp_path_factory.mktemp("corpus")
    articles = sorted(pydoc_data.topics.topics.items())[:60]
    source = folder / "articles.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for _, text in articles), encoding="utf-8")
    prepare([str(source), "--tokenizer", "bytes", "--out", str(folder / "dataset")])
    return folder / "dataset"


@pytest.fixture
def config_file(corpus, tmp_path) -> Path:
    """A config that trains a tiny GPT-2 with the linear head on `corpus` in a fraction of a second."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY_CONFIG.format(dataset=corpus), encoding="utf-8")
    return path


class Execute:
    """Runs commands of the project in processes of their own."""

    def environment(self, **extra: str) -> dict[str, str]:
        """One thread each, so that processes side by side do not fight over the cores."""
        return {**os.environ, "OMP_NUM_THREADS": "1", **extra}

    def __call__(self, *words, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess:
        """execute("train.py", "x.toml", ...): waits for the end; stdout and stderr as text."""
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=ROOT, env=self.environment(**environment), capture_output=True, text=True, timeout=timeout)

    def start(self, *words, **popen) -> subprocess.Popen:
        """Does not wait; stdout and stderr come together."""
        command = [sys.executable, *map(str, words)]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **popen
        )


@pytest.fixture(scope="session")
def execute() -> Execute:
    return Execute()
