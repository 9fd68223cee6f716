import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from data import encoding, tokenizers
from data.encoding import encoded, parts
from data.tokenizers import ByteTokenizer, load_tokenizer

needs_two_cpus = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU: no worker processes are started")
needs_fifo = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")


def documents(*texts):
    return ((text,) for text in texts)


def test_parts_know_their_documents(monkeypatch):
    monkeypatch.setattr(tokenizers, "PIECE", 10)
    dropped = []
    long = "some words and more words and words"
    found = list(parts([("short",), (), ("",), (long,)], 1, dropped))
    assert len(dropped) == 2
    assert "".join(part.text for part in found if part.share == found[-1].share) == long
    assert [part.first for part in found] == [True, True, False, False]
    assert [part.last for part in found] == [True, False, False, True]


def test_shares_are_uniform_and_follow_text_and_seed():
    shares = np.array([part.share for part in parts(documents(*map(str, range(5000))), 1, [])])
    assert 0 <= shares.min() and shares.max() < 1
    assert abs((shares < 0.05).mean() - 0.05) < 3 * np.sqrt(0.05 * 0.95 / 5000)
    (a, b, c), (d,) = parts(documents("x", "x", "y"), 1, []), parts(documents("x"), 2, [])
    assert a.share == b.share and a.share not in (c.share, d.share)


def test_one_end_of_text_after_each_document(monkeypatch):
    monkeypatch.setattr(tokenizers, "PIECE", 10)
    texts = ["one", "two words here and there and more", "é"]
    stream = parts(documents(*texts), 1, [])
    got = list(encoded(stream, ByteTokenizer(), "uint16", workers=1))
    expected = [i for text in texts for i in (*text.encode(), 256)]
    assert np.concatenate([part.ids for part in got]).tolist() == expected
    assert sum(part.n_bytes for part in got) == sum(len(text.encode()) for text in texts)
    assert all(part.ids.dtype == np.uint16 for part in got)


@needs_two_cpus
def test_workers_give_the_same_ids_in_the_same_order(tokenizer_json, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 500)
    texts = [f"the dog number {i} sleeps on the lazy fox " * (i % 7) for i in range(200)]
    tokenizer = load_tokenizer(str(tokenizer_json))
    alone, together = (list(encoded(parts(documents(*texts), 1, []), tokenizer, "uint32", workers)) for workers in (1, 2))
    assert len(alone) == len(together) == sum(map(bool, texts))
    for a, b in zip(alone, together, strict=True):
        assert np.array_equal(a.ids, b.ids) and a[:3] == b[:3] and a.n_bytes == b.n_bytes


def test_more_workers_than_documents(tokenizer_json):
    got = list(encoded(parts(documents("the dog", "a fox"), 1, []), load_tokenizer(str(tokenizer_json)), "uint16", workers=8))
    assert len(got) == 2


class Feeding:
    """A prepare in a process of its own that reads a named pipe, so that it can be caught in the middle of its work."""

    def __init__(self, execute, folder, *words):
        self.pipe = folder / "endless.jsonl"
        self.out = folder / "out"
        os.mkfifo(self.pipe)
        command = [sys.executable, "-m", "data.prepare", self.pipe, "--out", self.out, *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=execute.environment())
        self.source = open(self.pipe, "w", encoding="utf-8")  # returns when the other side reads

    def feed(self, n_lines: int = 7000) -> None:
        """6 MB by default: more than two workers and their queue hold, so that something gets written."""
        self.source.write(('{"text": "' + "the quick brown fox jumps over the lazy dog " * 20 + '"}\n') * n_lines)
        self.source.flush()

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    def written(self) -> int:
        return sum(path.stat().st_size for path in self.out.glob(".partial-*/*.bin"))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        try:
            self.source.close()
        except BrokenPipeError:
            pass
        self.process.communicate()


def wait_until(condition, seconds: float = 60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


@needs_two_cpus
@needs_fifo
def test_a_killed_worker_ends_the_program(execute, tmp_path, tokenizer_json):
    with Feeding(execute, tmp_path, "--tokenizer", tokenizer_json, "--workers", "2") as feeding:
        feeding.feed()
        wait_until(lambda: feeding.workers() and feeding.written())
        feeding.workers()[0].kill()
        try:
            feeding.feed()
            feeding.source.close()
        except BrokenPipeError:  # it has noticed already
            pass
        out, err = feeding.process.communicate(timeout=60)
        assert feeding.process.returncode == 1
        assert err.startswith("error: a worker process died") and err.count("\n") == 1
        assert not feeding.out.exists()


@needs_two_cpus
@needs_fifo
def test_workers_do_not_outlive_a_killed_program(execute, tmp_path, tokenizer_json):
    with Feeding(execute, tmp_path, "--tokenizer", tokenizer_json, "--workers", "2") as feeding:
        feeding.feed()
        wait_until(lambda: len(feeding.workers()) == 2 and feeding.written())
        workers = feeding.workers()
        feeding.process.kill()
        gone, alive = psutil.wait_procs(workers, timeout=20)
        for worker in alive:
            worker.kill()
        assert not alive


@needs_fifo
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_in_the_middle_leaves_nothing_that_looks_finished(execute, tmp_path, overwrite):
    text = tmp_path / "small.txt"
    text.write_text("a small text", encoding="utf-8")
    words = ("--tokenizer", "bytes", "--overwrite") if overwrite else ("--tokenizer", "bytes")
    if overwrite:
        assert execute("-m", "data.prepare", text, "--tokenizer", "bytes", "--out", tmp_path / "out").returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    with Feeding(execute, tmp_path, *words) as feeding:
        feeding.feed()
        wait_until(feeding.written)
        feeding.process.kill()
        feeding.process.wait()
        left = {path.name: path.read_bytes() for path in feeding.out.iterdir() if path.is_file()}
        assert left == before
    again = execute("-m", "data.prepare", text, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert again.returncode == 0, again.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_file()) == ["meta.json", "meta.pkl", "train.bin", "val.bin"]
    assert overwrite or not list((tmp_path / "out").glob(".partial-*"))


@needs_fifo
def test_an_interrupt_cleans_up(execute, tmp_path):
    with Feeding(execute, tmp_path, "--tokenizer", "bytes") as feeding:
        feeding.feed()
        wait_until(feeding.written)
        feeding.process.send_signal(signal.SIGINT)
        out, err = feeding.process.communicate(timeout=30)
        assert (feeding.process.returncode, err) == (130, "error: interrupted\n")
        assert not feeding.out.exists()
