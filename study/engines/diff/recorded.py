"""What a recording holds, read again; and what a difference is."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from study.errors import Refusal
from study.files import reading

FORMAT = 2  # 2: outputs with their magnitudes
Key = tuple[int, str, str, Any]  # step, kind, name, and which of it: (rank, call), or None for all together


class Entry(NamedTuple):
    """One thing that was seen: its place in the order of a rank is that in the list."""

    step: int  # from 1; the weights of step 0 are those before the first
    kind: str  # batch, random, forward, loss, gradient, norm, clipped, weights, held
    name: str
    call: int  # which call of it in the step, from 0
    rows: int  # of an output: how many rows are in the mean; of anything else: its elements
    dtype: str
    sketch: list[float]


class Seen(NamedTuple):
    """What is compared of a tensor."""

    sketch: np.ndarray
    dtype: str
    size: int  # elements, or rows


@dataclass
class Recording:
    """A folder of recordings, one of each rank, and those of the same training whose results were rounded otherwise."""

    folder: Path
    ranks: list[list[Entry]]
    facts: dict[str, Any]
    noise: list[Recording] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Read a folder. Raises Refusal where there is none, or a rank is missing."""
        files = sorted(folder.glob("rank-*.json.gz"), key=lambda path: int(path.name.split("-")[1].split(".")[0]))
        if not files:
            raise Refusal(f"{folder}: has no rank-0.json.gz; record a training into it, see docs/diff.md")
        content = []
        for path in files:
            with reading(path, "a recording"):
                content.append(json.loads(gzip.decompress(path.read_bytes())))
        if content[0].get("format") != FORMAT:
            raise Refusal(f"{folder}: was recorded by another release of zero-study; record it again")
        if len(content) != (world := content[0]["world_size"]):
            raise Refusal(f"{folder}: has {len(content)} recordings of {world} ranks; record all of them again")
        ranks = [[Entry(*entry) for entry in one.pop("entries")] for one in content]
        made = cls(folder, ranks, content[0], [cls.read(path) for path in sorted(folder.glob("noise-*"))])
        for noise in made.noise:
            if made.facts["steps"] > noise.facts["steps"] or made.batches != noise.batches[: len(made.batches)]:
                raise Refusal(f"{noise.folder}: is of fewer steps than {folder}, or of other batches; record it anew")
        return made

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def batches(self) -> list[tuple[int, list[float]]]:
        """What rank 0 was given, by step."""
        return [(entry.step, entry.sketch) for entry in self.ranks[0] if entry.kind == "batch"]

    @cached_property
    def cut(self) -> list[list[int]]:
        """How a step's batch is cut: by rank, the rows of each forward pass of the first step."""
        return [[len(e.sketch) for e in entries if (e.kind, e.step) == ("batch", 1)] for entries in self.ranks]

    def values(self, is_apart: bool) -> dict[Key, Seen]:
        """What was seen, by key, in the order of rank 0. `is_apart`: outputs by rank and call, else their mean."""
        found: dict[Key, Seen] = {}
        rows: dict[Key, list[Seen]] = {}
        for rank, entries in enumerate(self.ranks):
            for entry in entries:
                seen = Seen(np.array(entry.sketch), entry.dtype, entry.rows)
                if entry.kind == "forward" and not is_apart:
                    rows.setdefault((entry.step, entry.kind, entry.name, None), []).append(seen)
                elif is_apart or not rank:
                    place = (rank, entry.call) if is_apart else entry.call
                    found[entry.step, entry.kind, entry.name, place] = seen
        for key, outputs in rows.items():
            total = max(1, sum(one.size for one in outputs))
            mean = np.sum([one.size / total * one.sketch for one in outputs], axis=0)
            found[key] = Seen(mean, outputs[0].dtype, total)
        return found | dict(_updates(found))


def _updates(found: dict[Key, Seen]) -> Iterator[tuple[Key, Seen]]:
    """By parameter, and of all of them together, one behind the other, as `whole`."""
    together: dict[tuple[int, Any], list[Seen]] = {}
    for (step, kind, name, place), seen in found.items():
        if kind == "weights" and step and (before := found.get((step - 1, kind, name, place))):
            update = seen._replace(sketch=seen.sketch - before.sketch)
            together.setdefault((step, place), []).append(update)
            yield (step, "update", name, place), update
    for (step, place), updates in together.items():
        whole = np.concatenate([update.sketch for update in updates])
        yield (step, "whole", "", place), Seen(whole, updates[0].dtype, sum(update.size for update in updates))


class Difference(NamedTuple):
    """A tensor in which two trainings differ by more than rounding."""

    step: int
    kind: str
    name: str
    ranks: list[int]  # on which it differs; empty: of all together
    distance: float  # over the norm of A's
    bound: float  # the same
    factor: float | None  # B is so many times A; None: it is no multiple
    missing: str | None  # in which of A and B there is none, or A has zeros
    broken: str = ""  # in which of them it is not finite
