"""Read and validate recordings of trainings. Also define `Difference`, the result of comparing a tensor."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import Refusal
from ..files import decompressed, read_whole

# 3: the identity of a recording, and how it ended. 4: shapes, parts of batches, order of backward. 5: rows without
# their padding, the code and the settings of the training, names of buffers.
FORMAT = 5
READABLE = (4, FORMAT)
FILE = re.compile(r"rank-(\d{1,6})\.json\.gz")
NOISE = re.compile(r"noise--?\d{1,9}")
KINDS = ("batch", "unpadded", "random", "forward", "loss", "gradient", "norm", "clipped", "weights", "held")
MOST_RANKS = 1 << 20
LARGEST = 1 << 1000  # the largest integer that a recording may have in place of a float
SIZE = 32  # numbers of a sketch


class Key(NamedTuple):
    """The identity of a recorded tensor: its step, kind, name, rank and call."""

    step: int
    kind: str
    name: str
    place: Any  # (rank, call); only the call, for rank 0; or None, for the mean over all ranks and calls

    @property
    def rank(self) -> int | None:
        return self.place[0] if isinstance(self.place, tuple) else None

    @property
    def ranks(self) -> list[int]:
        """The rank to which the tensor belongs, as a list. Empty if several ranks share the tensor."""
        return [] if self.rank is None else [self.rank]


class Damaged(Refusal):
    """The error for a recording that is damaged, incomplete, or mixed from several recordings."""


class Entry(NamedTuple):
    """One recorded tensor. The entries of a rank are in the order of execution."""

    step: int  # from 1; the weights of step 0 are those before the first
    kind: str  # batch, unpadded, random, forward, loss, gradient, norm, clipped, weights, held
    name: str
    call: int  # which call of it in the step, from 0
    rows: int  # for an output, the number of rows in the mean; otherwise the number of elements
    dtype: str
    sketch: list[float]
    shape: list[int]  # of an output; for unpadded rows, the lengths of the padded rows; otherwise empty


class Seen(NamedTuple):
    """The recorded facts of a tensor that are compared: its sketch, data type, size and shape."""

    sketch: np.ndarray
    dtype: str
    size: int  # elements, or rows
    shape: tuple[int, ...] = ()  # of the output of one call, otherwise empty


@dataclass
class Recording:
    """The recording of a training on all of its ranks, with the runs with random rounding that belong to it."""

    folder: Path
    ranks: list[list[Entry]]
    facts: dict[str, Any]
    noise: list[Recording] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Read a recording from its folder, together with its runs with random rounding (noise runs).

        Raises Refusal if there is no recording, if another release of zero-study made it, or if a noise run is of
        another training. Raises Damaged if a file is damaged or missing, or if the files belong to different
        recordings.
        """
        recording = cls._read_alone(folder)
        folders = [path for path in sorted(folder.glob("noise-*")) if NOISE.fullmatch(path.name) and path.is_dir()]
        recording.noise = [cls._read_alone(path) for path in folders]
        for draw in recording.noise:
            if draw.facts["of"] != recording.facts["token"]:
                raise Damaged(
                    f"{draw.folder}: this run with noise belongs to another recording than the one in {folder}. Record "
                    "it again."
                )
            if (
                recording.facts["steps"] > draw.facts["steps"]
                or recording.batches != draw.batches[: len(recording.batches)]
            ):
                raise Damaged(
                    f"{draw.folder}: this run with noise has fewer steps than {folder}, or different "
                    "batches. Record it again."
                )
        return recording

    @classmethod
    def _read_alone(cls, folder: Path) -> Recording:
        """Read a recording without its noise runs."""
        files = {int(match[1]): path for path in _listed(folder) if (match := FILE.fullmatch(path.name))}
        if not files:
            raise Refusal(
                f"{folder}: this folder has no rank-0.json.gz. Record a training into it with `python -m "
                "zero_study.diff --output`."
            )
        ranks, facts = [], []
        for rank, path in sorted(files.items()):
            facts_of_rank, entries = _read_rank(path)
            if facts_of_rank["rank"] != rank:
                raise Damaged(
                    f"{path}: the file says that it is of rank {facts_of_rank['rank']}. Record this training again."
                )
            ranks.append(entries)
            facts.append(facts_of_rank)
        if len({each["token"] for each in facts}) > 1:
            raise Damaged(
                f"{folder}: this folder has ranks of several recordings. Record all ranks of one training again."
            )
        world_size = facts[0]["world_size"]
        if sorted(files) != list(range(world_size)) or len({each["world_size"] for each in facts}) > 1:
            raise Damaged(
                f"{folder}: this folder only has the ranks {', '.join(map(str, sorted(files)[:8]))} of a "
                f"training on {world_size} ranks. Record all ranks again."
            )
        # The rank that ended first determines how many steps the training completed.
        first = min(facts, key=lambda each: (each["completed"], each["raised"] is None))
        facts[0] |= {name: first[name] for name in ("completed", "raised")}
        return cls(folder, ranks, facts[0])

    @property
    def ended_early(self) -> str | None:
        """A text that says how the training ended before all steps were recorded. None if it did not end early."""
        completed, num_requested, raised = (self.facts[name] for name in ("completed", "asked", "raised"))
        if completed >= num_requested:
            return None
        reason = f"the script ended with {raised}" if raised else "the script ended"
        return f"{reason} after {completed} of the {num_requested} requested steps"

    def after(self, step: int) -> Recording:
        """Return the recording of the steps after this one, numbered from 1, as if the training had begun there."""
        ranks = [
            [
                entry._replace(step=entry.step - step)
                for entry in entries
                if entry.step > step or (entry.step, entry.kind) == (step, "weights")
            ]
            for entries in self.ranks
        ]
        counts = {name: max(0, self.facts[name] - step) for name in ("steps", "asked", "completed")}
        facts = {**self.facts, **counts, "rates": self.facts["rates"][step:]}
        return replace(self, ranks=ranks, facts=facts, noise=[draw.after(step) for draw in self.noise])

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def batches(self) -> list[tuple[int, list[float]]]:
        """The batches of rank 0: for each forward pass, the step and a digest of each row."""
        # The entry without a name describes all tensors of the batch together.
        return [(entry.step, entry.sketch) for entry in self.ranks[0] if entry.kind == "batch" and not entry.name]

    @cached_property
    def cut(self) -> list[list[int]]:
        """How the first batch is split: for each rank, the number of rows in each forward pass of the first step."""
        return [[len(rows) for rows in passes] for passes in self.rows(1)]

    def rows(self, step: int, part: str = "", without_padding: bool = False) -> list[list[list[float]]]:
        """Return a digest of each row of a step's batch, as lists by rank, forward pass and row.

        `part` is the name of one input tensor; empty for all tensors together. `without_padding` leaves out the padded
        positions of each row, if the recording has the rows without them.
        """
        rows = []
        for entries in self._by_step:
            passes = {e.call: e.sketch for e in entries.get(step, ()) if (e.kind, e.name) == ("batch", part)}
            if without_padding:
                passes |= {e.call: e.sketch for e in entries.get(step, ()) if (e.kind, e.name) == ("unpadded", part)}
            rows.append(list(passes.values()))
        return rows

    def padded_lengths(self, step: int) -> set[int]:
        """Return the lengths to which the rows of a step are padded. Empty if no row is known to have padding."""
        entries = (entry for by_step in self._by_step for entry in by_step.get(step, ()) if entry.kind == "unpadded")
        return {length for entry in entries for length in entry.shape}

    @cached_property
    def _by_step(self) -> list[dict[int, list[Entry]]]:
        """The entries of each rank by step, in the order of execution."""
        ranks: list[dict[int, list[Entry]]] = []
        for entries in self.ranks:
            ranks.append({})
            for entry in entries:
                ranks[-1].setdefault(entry.step, []).append(entry)
        return ranks

    def of_kind(self, rank: int, step: int, kind: str) -> dict[tuple[int, str, str, int], Entry]:
        """Return the recorded tensors of one kind in a step of one rank, by (step, kind, name, call)."""
        return {entry[:4]: entry for entry in self._by_step[rank].get(step, ()) if entry.kind == kind}

    def shapes(self, step: int) -> dict[str, list[tuple[int | None, list[int]]]]:
        """Return the shapes of each module output in a step, by name, one per call.

        Each comes with the number of rows of its forward pass, which is None if it is unknown.
        """
        shapes: dict[str, list[tuple[int | None, list[int]]]] = {}
        for rank, passes in enumerate(self.rows(step)):
            outputs: dict[str, list[Entry]] = {}
            for entry in self.of_kind(rank, step, "forward").values():
                outputs.setdefault(entry.name, []).append(entry)
            for name, calls in outputs.items():
                per_pass, remainder = divmod(len(calls), len(passes)) if passes else (0, 0)
                counts = [
                    None if remainder or not per_pass else len(passes[at // per_pass]) for at in range(len(calls))
                ]
                shapes.setdefault(name, []).extend(zip(counts, [entry.shape for entry in calls], strict=True))
        return shapes

    def values(self, by_call: bool) -> dict[Key, Seen]:
        """Return the recorded tensors by key, in the order in which rank 0 executed them.

        If `by_call`, the tensors of all ranks are returned by rank and call. Otherwise outputs are means over all rows,
        and all other tensors are those of rank 0.
        """
        tensors: dict[Key, Seen] = {}
        outputs: dict[Key, list[Seen]] = {}
        for rank, entries in enumerate(self.ranks):
            for entry in entries:
                seen = Seen(np.array(entry.sketch), entry.dtype, entry.rows, tuple(entry.shape))
                if entry.kind == "forward" and not by_call:
                    outputs.setdefault(Key(entry.step, entry.kind, entry.name, None), []).append(seen)
                elif by_call or not rank:
                    place = (rank, entry.call) if by_call else entry.call
                    tensors[Key(entry.step, entry.kind, entry.name, place)] = seen
        tensors |= {key: _mean(parts) for key, parts in outputs.items()}
        return tensors | dict(_updates(tensors))


def _mean(outputs: list[Seen]) -> Seen:
    """Return the mean of an output over all rows, computed from its mean in each pass."""
    total = max(1, sum(output.size for output in outputs))
    mean = np.sum([output.size / total * output.sketch for output in outputs], axis=0)
    return Seen(mean, outputs[0].dtype, total)


def _updates(tensors: dict[Key, Seen]) -> Iterator[tuple[Key, Seen]]:
    """Yield the update of each parameter, and all updates joined into one tensor, which is named `whole`."""
    together: dict[tuple[int, Any], list[Seen]] = {}
    for key, seen in tensors.items():
        if key.kind == "weights" and key.step and (before := tensors.get(key._replace(step=key.step - 1))):
            update = seen._replace(sketch=seen.sketch - before.sketch)
            together.setdefault((key.step, key.place), []).append(update)
            yield key._replace(kind="update"), update
    for (step, place), updates in together.items():
        whole = np.concatenate([update.sketch for update in updates])
        yield Key(step, "whole", "", place), Seen(whole, updates[0].dtype, sum(update.size for update in updates))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise Refusal(
            f"{folder}: this folder has no recording ({error.strerror}). Record a training into it with "
            "`python -m zero_study.diff --output`."
        ) from None


# A function for each fact of a rank that says whether its value is valid.
_FACTS: dict[str, Any] = {
    "rank": lambda value: _is_count(value, MOST_RANKS),
    "world_size": lambda value: _is_count(value, MOST_RANKS) and value > 0,
    "token": lambda value: isinstance(value, str) and bool(value),
    "of": lambda value: value is None or isinstance(value, str),
    "steps": lambda value: _is_count(value),
    "asked": lambda value: _is_count(value),
    "completed": lambda value: _is_count(value),
    "raised": lambda value: value is None or isinstance(value, str),
    "engine": lambda value: isinstance(value, str),
    "backward": lambda value: _is_list_of_texts(value),
    "versions": lambda value: isinstance(value, dict) and all(isinstance(part, str) for part in value.values()),
    "script": lambda value: value is None or isinstance(value, str),
    "arguments": lambda value: value is None or _is_list_of_texts(value),
    "optimizers": lambda value: value is None or (isinstance(value, list) and all(map(_is_settings, value))),
    "rates": lambda value: isinstance(value, list) and all(map(_is_list_of_numbers, value)),
    "buffers": lambda value: value is None or _is_list_of_texts(value),
}
# The facts that a recording of format 4 does not have.
_UNKNOWN: dict[str, Any] = {"script": None, "arguments": None, "optimizers": None, "rates": [], "buffers": None}


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < LARGEST)


def _is_settings(value: Any) -> bool:
    """Return whether a value has the form of an optimizer group's settings: single values, or lists of them."""
    return isinstance(value, dict) and all(
        isinstance(part, (str, float, int, type(None)))
        for setting in value.values()
        for part in (setting if isinstance(setting, list) else [setting])
    )


def _is_count(value: Any, most: int = 1 << 53) -> bool:
    return type(value) is int and 0 <= value < most


def _read_rank(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """Read and validate one rank's file. Raises Damaged if it is invalid, Refusal if another release wrote it."""
    try:
        content = json.loads(decompressed(read_whole(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(
            f"{path}: this file is damaged ({' '.join(str(error).split())}). Record this training again."
        ) from None
    if not isinstance(content, dict) or "format" not in content:
        raise Damaged(f"{path}: this file is not a recording. Record this training again.")
    if type(content["format"]) is not int or content["format"] not in READABLE:
        raise Refusal(f"{path}: this file was recorded by another release of zero-study. Record it again.")
    content = _UNKNOWN | content
    for name, is_valid in _FACTS.items():
        if not is_valid(content.get(name)):
            raise Damaged(f"{path}: {name} is damaged or missing. Record this training again.")
    entries = content.pop("entries", None)
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise Damaged(f"{path}: its entries are damaged or missing. Record this training again.")
    made = [Entry(*entry) for entry in entries]
    if len({entry[:4] for entry in made}) < len(made):
        raise Damaged(f"{path}: this file has two entries for one tensor. Record this training again.")
    if {entry.step for entry in made} | {0} != set(range(min(content["steps"], len(made)) + 1)):
        raise Damaged(
            f"{path}: this file says that it has {content['steps']} steps, but its entries are of "
            "different steps. Record this training "
            "again."
        )
    if not content["completed"] <= content["steps"] <= content["asked"]:
        raise Damaged(f"{path}: its numbers of steps contradict each other. Record this training again.")
    return content, made


def _is_entry(entry: Any) -> bool:
    """Return whether these values have the types and sizes of an `Entry`."""
    if not isinstance(entry, list) or len(entry) != len(Entry._fields):
        return False
    step, kind, name, call, rows, dtype, sketch, shape = entry
    has_values = _is_list_of_numbers(sketch)
    sizes = {"norm": 1, **dict.fromkeys(("forward", "gradient", "clipped", "weights", "held"), SIZE)}
    return (
        all(map(_is_count, (step, call, rows)))
        and isinstance(kind, str)
        and kind in KINDS
        and isinstance(name, str)
        and isinstance(dtype, str)
        and has_values
        and len(sketch) == sizes.get(kind, len(sketch))
        and isinstance(shape, list)
        and all(map(_is_count, shape))
        and (kind not in ("batch", "unpadded", "random") or all(math.isfinite(value) for value in sketch))
    )


def facts_of(folder: Path, rank: int) -> dict[str, Any]:
    """Return the facts about one rank in the recording in a folder. Raises Refusal if there is no recording."""
    path = folder / f"rank-{rank}.json.gz"
    if not path.exists():
        raise Refusal(
            f"{folder}: this folder has no recording. Record this training without --noise first, into the same folder."
        )
    return _read_rank(path)[0]


class Difference(NamedTuple):
    """A tensor in which two trainings differ by more than rounding."""

    step: int
    kind: str
    name: str
    ranks: list[int]  # on which the tensor differs; empty if it belongs to all ranks together
    distance: float  # relative to the norm of A's tensor
    bound: float  # also relative to the norm of A's tensor
    factor: float | None  # B's tensor is A's, multiplied by this; None if it is not a multiple
    missing: str | None  # A or B: the side without the tensor; A also if A's tensor is zero; None: neither
    broken: str = ""  # A, B, or A and B: the side on which the tensor is not finite
