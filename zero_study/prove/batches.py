"""Compare the rows of batches by hashes: over ranks, and with earlier batches of the same rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..engines.readback.parameters import local
from .checksums import INTEGERS

MOST_COLUMNS = 256  # of a row that are hashed, evenly spaced
MOST_TENSORS = 4  # of a batch
MOST_ROWS = 256  # of a step that are compared between ranks
MOST_REMEMBERED = 2**20  # rows or batches
SHARED = 0.1  # of the rows of a step that are on several ranks, beyond what independent draws share by chance
CHANCES = 3  # how many times the overlap of independent draws may be chance
IN_A_ROW = 3  # steps
_MULTIPLIER = -7046029254386353131  # the golden ratio times 2^64, as a signed integer


def hashes(arguments: Any) -> torch.Tensor | None:
    """Return a hash of each row of a model's inputs, as int64 on their device. None if there are no rows.

    The first tensor decides the number of rows. Tensors with another number of rows are left out.
    """
    leaves = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    tensors = [local(leaf).detach() for leaf in leaves if leaf.layout is torch.strided and not leaf.is_nested]
    tensors = [tensor for tensor in tensors if len(tensor) == len(tensors[0]) and tensor.numel()][:MOST_TENSORS]
    total: torch.Tensor | None = None
    for number, tensor in enumerate(tensors, 1):
        flat = tensor.reshape(len(tensor), -1)
        flat = torch.view_as_real(flat.resolve_conj()).flatten(1) if flat.is_complex() else flat
        sample = flat[:, :: max(1, flat.shape[1] // MOST_COLUMNS)].contiguous()
        values = sample.view(INTEGERS[sample.element_size()]).long()
        factors = torch.arange(number, number + values.shape[1], device=values.device) * _MULTIPLIER
        of_tensor = ((values + (values >> 17)) * factors).sum(1) * (2 * number + 1)
        total = of_tensor if total is None else total + of_tensor.to(total.device)
    return total


class Order:
    """The batches of one rank so far, to find those that are repeated. Its findings are notes: both can be meant."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}  # kind -> text
        self._first: dict[int, int] = {}  # hash of a batch -> its number
        self._updates: list[int] = []  # of each batch
        self._last: int | None = None  # number of the earlier batch that was equal to the last batch
        self._in_a_row = 0  # batches that come again in the same order
        self._epoch = 0
        self._rows: set[int] = set()  # of the current epoch
        self._num_rows = self._num_repeated = 0

    def add(self, update: int, rows: Sequence[int], epoch: int) -> None:
        """Compare a batch with earlier ones. `epoch` is the number of iterations over data loaders that have begun."""
        if len(self._updates) >= MOST_REMEMBERED:
            return
        number, key = len(self._updates), hash(tuple(rows))
        self._updates.append(update)
        before = self._first.setdefault(key, number)
        follows = before < number and self._last is not None and before == self._last + 1
        self._in_a_row = self._in_a_row + 1 if follows else 1
        if self._in_a_row >= IN_A_ROW:
            first, second = self._updates[before - 1], self._updates[before]
            self.notes.setdefault(
                "order",
                f"batches come again in the same order: those of updates {self._updates[number - 1]} and {update} are "
                f"those of updates {first} and {second}. If every epoch should have its own order, call set_epoch",
            )
        self._last = before if before < number else None
        if epoch != self._epoch:
            self._epoch, self._num_rows, self._num_repeated = epoch, 0, 0
            self._rows.clear()
        if epoch and len(self._rows) < MOST_REMEMBERED:
            self._num_rows += len(rows)
            self._num_repeated += len(rows) - len(set(rows) - self._rows)
            self._rows.update(rows)
            if self._num_repeated > max(IN_A_ROW * len(rows), SHARED * self._num_rows):
                self.notes.setdefault(
                    "repeats",
                    f"{self._num_repeated:,} of {self._num_rows:,} rows came more than once within one iteration over "
                    f"the data loader (update {update})",
                )


class Overlap:
    """The rows that several ranks train on, in one step or in one epoch."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._in_a_row = 0
        self._first = 0
        self._epoch = self._begin_of_epoch = 0
        self._rows: dict[int, set[int]] = {}  # rank -> rows of the current epoch
        self._was_divided = False  # in an earlier epoch, no rows were on several ranks

    def find(self, update: int, rows: Mapping[int, Sequence[int]], epoch: int) -> tuple[int, str] | None:
        """Compare the rows of a step on all ranks of a group. Return the first step and a finding, or None.

        `epoch` is 0 if the ranks are not in the same epoch, or if there is none.
        """
        own = {rank: set(hashed) for rank, hashed in rows.items()}
        return self._of_epoch(update, own, epoch) or self._of_step(update, own)

    def _of_step(self, update: int, own: dict[int, set[int]]) -> tuple[int, str] | None:
        together, share = _shared(own)
        are_new = not together <= self._seen  # data that are the same in each step are made up
        if len(self._seen) < MOST_REMEMBERED:
            self._seen |= together
        by_chance = CHANCES * sum(map(len, own.values())) / max(1, len(self._seen))
        if not are_new or share <= SHARED + min(by_chance, 1 - SHARED - 0.01):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        self._first = update if self._in_a_row == 1 else self._first
        if self._in_a_row < IN_A_ROW:
            return None
        return self._first, (
            f"rows are trained on more than one rank: {share:.0%} of the rows of update {update} are on several ranks "
            f"of {sorted(own)}. Look for a sampler without ranks, for seeds, and for what changed there"
        )

    def _of_epoch(self, update: int, own: dict[int, set[int]], epoch: int) -> tuple[int, str] | None:
        """Compare the rows of an epoch with an earlier epoch, in which no row was on several ranks."""
        if epoch != self._epoch:
            together, share = _shared(self._rows)
            is_whole = self._epoch > 0 and len(self._rows) > 1 and len(together) < MOST_REMEMBERED
            begin, self._begin_of_epoch, num_ranks = self._begin_of_epoch, update, len(self._rows)
            self._epoch, self._rows = epoch, {}
            # Samplers repeat less than one row per rank, so that all ranks have equally many.
            is_shared = share > SHARED and share * len(together) >= num_ranks
            if is_whole and self._was_divided and is_shared:
                return begin, (
                    f"rows are trained on more than one rank: {share:.0%} of the rows from this update to update "
                    f"{update - 1} are on several ranks, and none were in the watched steps of the epoch before. Look "
                    "for samplers whose random numbers are no longer the same on all ranks"
                )
            self._was_divided = self._was_divided or (is_whole and share == 0)
        for rank, hashed in own.items():
            of_rank = self._rows.setdefault(rank, set())
            of_rank |= hashed if len(of_rank) < MOST_REMEMBERED else set()
        return None


def _shared(own: Mapping[int, set[int]]) -> tuple[set[int], float]:
    """Return all rows, and the share of them that several ranks have."""
    together = set[int]().union(*own.values())
    num_shared = sum(sum(row in rows for rows in own.values()) > 1 for row in together)
    return together, num_shared / max(1, len(together))
