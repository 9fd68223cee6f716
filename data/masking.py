"""Masked-LM inputs: BERT's 80/10/10 rule (Devlin et al. 2019; arXiv 2603.10225, appendix C.2), vectorised and reproducible."""

from dataclasses import dataclass

import numpy as np

from commands import InputError
from data.randomness import generator

DRAWS = 3  # uniform numbers per position: which positions, which treatment, which random token


@dataclass(frozen=True)
class Masking:
    """Selects max(1, round(fraction x selectable)) positions per row; of these 80 % become the mask id, 10 % a random id, 10 % stay.

    Special ids and the mask id are never selected and never a random replacement; a row that holds nothing else has no
    position to score. Raises InputError for a fraction outside (0, 1] or where no ordinary id is left.
    """

    fraction: float
    mask_token_id: int
    vocab_size: int
    special_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if not 0 < self.fraction <= 1:
            raise InputError(f"data.mask_fraction must lie in (0, 1], not {self.fraction}")
        if self.mask_token_id < 0:
            raise InputError(f"data.mask_token_id must not be negative, not {self.mask_token_id}")
        special = np.array(sorted({*self.special_ids, self.mask_token_id}), dtype=np.int64)
        ordinary = np.setdiff1d(np.arange(self.vocab_size), special)
        if len(ordinary) == 0:
            raise InputError(f"a vocabulary of {self.vocab_size} holds no ordinary id to mask")
        object.__setattr__(self, "special", special)
        object.__setattr__(self, "ordinary", ordinary)

    @classmethod
    def for_dataset(cls, meta, fraction: float, mask_token_id: int | None = None) -> "Masking":
        """The masking of a dataset (its DatasetMeta), with its own mask id unless another is given."""
        mask_token_id = meta.mask_token_id if mask_token_id is None else mask_token_id
        return cls(fraction, mask_token_id, meta.vocab_size, tuple(meta.special_ids))

    def train(self, tokens: np.ndarray, seed: int, step: int, rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Masks tokens (B, T), the rows numbered `rows` (B,) of the global batch of `step`. A function of (seed, step, row)."""
        return self._mask(tokens, [generator(seed, "train masks", step, row) for row in rows])

    def validation(self, tokens: np.ndarray, windows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Masks the evaluation windows numbered `windows` (B,): the same for every seed, batch size and number of ranks."""
        return self._mask(tokens, [generator(0, "validation masks", 0, window) for window in windows])

    def _mask(self, tokens: np.ndarray, generators: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """-> inputs (B, T), targets (N,), flat positions (N,) in ascending order, all int64."""
        n_rows, length = tokens.shape
        draws = np.empty((n_rows, DRAWS, length))
        for row, stream in zip(draws, generators, strict=True):
            stream.random(out=row)
        order, treatment, replacement = draws[:, 0], draws[:, 1], draws[:, 2]  # (B, T) each, uniform in [0, 1)

        selectable = ~np.isin(tokens, self.special)  # (B, T)
        available = selectable.sum(axis=1)  # (B,)
        count = np.minimum(available, np.maximum(1, np.rint(self.fraction * available).astype(np.int64)))  # (B,)
        ranked = np.where(selectable, order, np.inf).argsort(axis=1, kind="stable")  # (B, T), selectable positions first
        selected = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(selected, ranked, np.arange(length) < count[:, None], axis=1)

        inputs = tokens.copy()
        inputs[selected & (treatment < 0.8)] = self.mask_token_id
        random = selected & (treatment >= 0.8) & (treatment < 0.9)
        inputs[random] = self.ordinary[(replacement[random] * len(self.ordinary)).astype(np.int64)]
        positions = np.flatnonzero(selected)
        return inputs, tokens.reshape(-1)[positions], positions
