"""Training windows in a drawn order: the step number alone decides what a step sees, so a resumed run sees the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from simmoe.errors import DataError


class Windows:
    """Consecutive windows of one token stream, cut at an offset drawn anew each epoch and visited in a drawn order.

    Args:
        tokens: [num_tokens] integers.
        sequences: windows a step.
        context: tokens a window.
    Raises:
        DataError: the stream is too short for one step.
    """

    def __init__(self, tokens: np.ndarray[Any, Any], sequences: int, context: int, seed: int) -> None:
        self._tokens = tokens
        self._sequences, self._context, self._seed = sequences, context, seed
        self._per_epoch = (len(tokens) - context) // context // sequences
        if self._per_epoch < 1:
            raise DataError(
                f"{len(tokens)} training tokens are too few for {sequences} windows of {context}; "
                f"give {(sequences + 1) * context} or more"
            )
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def step(self, step: int) -> torch.Tensor:
        """[sequences, context] int64 token ids of step ``step``."""
        epoch, at = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            offset = rng.integers(self._context)
            self._starts = offset + rng.permutation(self._per_epoch * self._sequences) * self._context
            self._epoch = epoch
        starts = self._starts[at * self._sequences : (at + 1) * self._sequences]
        return torch.from_numpy(self._tokens[starts[:, None] + np.arange(self._context)].astype(np.int64))
