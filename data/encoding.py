"""Documents to token ids, in this process or in several, in order and in bounded memory."""

import hashlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from commands import RunFailed
from data.token_file import DTYPES
from data.tokenizers import load_tokenizer, pieces

BATCH_CHARACTERS = 1 << 20  # of text per task: enough to make its way to a worker worth while


class Part(NamedTuple):
    """A document, or a piece of a long one. `share` is the document's place in [0, 1), by which it is dealt to a split."""

    text: str
    share: float
    first: bool
    last: bool


class Encoded(NamedTuple):
    share: float
    first: bool
    last: bool
    ids: np.ndarray  # (n,), with the end-of-text id after a document's last part
    n_bytes: int  # of the text, in UTF-8


def parts(documents: Iterable[Iterable[str]], seed: int, dropped: list) -> Iterator[Part]:
    """The parts of all documents; each empty or null one adds an entry to `dropped` instead."""
    for document in documents:
        ahead = pieces(document)
        text, first = next(ahead, ""), True
        if not text:
            dropped.append(None)
            continue
        share = _share(text, seed)
        while text:
            following = next(ahead, "")
            yield Part(text, share, first, last=not following)
            text, first = following, False


def _share(text: str, seed: int) -> float:
    """A seeded hash of the document (of its first piece), uniform in [0, 1): the same text is always dealt alike."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=seed.to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little") / 2**64


def encoded(stream: Iterable[Part], tokenizer, dtype: str, workers: int) -> Iterator[Encoded]:
    """Encodes parts in their order. Raises RunFailed if a worker process dies."""
    batches = _batches(stream)
    if workers == 1:
        for batch in batches:
            yield from _encode(tokenizer, dtype, batch)
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # Spawned, not forked: a fork copies locks that threads of this process may hold at that moment.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(tokenizer.name, dtype))
    pending = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_work, batch))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool:
        raise RunFailed("a worker process died (killed, or out of memory): nothing was written; try fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(stream: Iterable[Part]) -> Iterator[list[Part]]:
    batch, characters = [], 0
    for part in stream:
        batch.append(part)
        characters += len(part.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(tokenizer, dtype: str, batch: list[Part]) -> list[Encoded]:
    done = []
    for part in batch:
        ids = tokenizer.encode(part.text)
        if part.last:
            ids.append(tokenizer.eot_id)
        done.append(Encoded(part.share, part.first, part.last, np.array(ids, dtype=DTYPES[dtype]), len(part.text.encode("utf-8"))))
    return done


_worker = {}  # the tokenizer and dtype of a worker process


def _start_worker(tokenizer_name: str, dtype: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker["arguments"] = (load_tokenizer(tokenizer_name), dtype)


def _end_with_parent() -> None:
    from multiprocessing import parent_process

    parent_process().join()
    os._exit(1)  # a killed parent would leave its workers waiting for ever


def _work(batch: list[Part]) -> list[Encoded]:
    return _encode(*_worker["arguments"], batch)
