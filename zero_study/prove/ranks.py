"""Compare what all ranks observed in each optimizer step. The ranks post their facts in the process group's store.

A collective could hang other ranks, and would change the order of the training's own collectives. The store cannot.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from .. import terminal
from . import store_exchange
from .batches import Overlap

NEAR = 1e-3  # relative difference of two norms that rounding may cause
ZERO_STEPS = 2  # in a row with gradients of zero; a single one may be a batch without targets
MOST_WAITING = 256  # steps that wait for other ranks; earlier ones are not compared


class Finding(NamedTuple):
    """What is wrong, from which optimizer step on."""

    kind: str  # reported once
    update: int
    text: str


class Facts(NamedTuple):
    """What one rank observed in one step. May be written as JSON."""

    weights: dict[str, int]  # number of a parameter -> its bits, before the update
    gradients: dict[str, int]
    norm: float | None  # by which the gradients were clipped
    rows: list[int]  # hashes
    epoch: int  # the number of the iteration over the data loader, from 1; 0 if there is none
    is_zero: bool | None  # whether all gradients that were read are zero; None if none was read


class Ranks:
    """The findings of a watch: those of single ranks, and on rank 0 those of comparisons between ranks."""

    def __init__(self, name: str | None, group: Sequence[int], names: Sequence[str], kinds: set[str]) -> None:
        """Begin. `name` is the same on all ranks; None if this rank is watched alone.

        `group` has the ranks whose weights must be equal; none are compared if it has fewer than two. `names` has the
        names of the parameters by their numbers. `kinds` has those of findings that exist already.
        """
        self.notes: dict[str, str] = {}  # kind -> text
        self.missing: list[int] = []  # ranks that did not report to the end
        self.num_messages = self.num_characters = 0  # that this rank has posted
        self.num_compared = 0  # steps
        self._rank, self._num_ranks = (0, 1) if name is None else (dist.get_rank(), dist.get_world_size())
        self._store: Store | None = None
        if self._num_ranks > 1:  # the store outlives the process group, which a script may end
            self._store = PrefixStore(f"zero-study/{name}/watch", _get_default_store())
        self._group, self._names = group, names
        self._known = set(kinds)
        self._new: list[Finding] = []
        self._all: list[Finding] = []
        self._steps: dict[int, dict[int, Facts]] = {}  # update -> rank -> facts
        self._next = dict.fromkeys(range(self._num_ranks), 0)  # rank -> the number of its next message
        self._ended: dict[int, int] = {}  # rank -> its number of updates
        self._equal: set[str] = set()  # kinds and numbers of parameters that ranks had in common in some step
        self._unlike: set[str] = set()  # and of those that differ in the first comparison
        self._overlap = Overlap()
        self._zero = 0

    def add(self, finding: Finding) -> None:
        """Add a finding, unless one of its kind exists."""
        if finding.kind not in self._known:
            self._known.add(finding.kind)
            self._new.append(finding)
            self._all.append(finding)

    def take(self) -> list[Finding]:
        """Return the findings since the last call."""
        new, self._new = self._new, []
        return new

    def post(self, steps: Mapping[int, Facts], findings: Sequence[Finding], ended: int | None = None) -> None:
        """Report this rank's steps and findings. `ended` is the number of updates at the end of the training."""
        if self._rank == 0:
            self._receive(0, steps, findings, ended)
        for finding in findings:
            self.add(finding)
        if self._store is None or self._rank == 0:
            return
        text = json.dumps([{key: list(facts) for key, facts in steps.items()}, findings, self.notes, ended])
        self._store.set(f"{self._rank}/{self._next[self._rank]}", text)
        self._next[self._rank] += 1
        self.num_messages += 1
        self.num_characters += len(text)

    def receive(self) -> None:
        """Read what other ranks have posted, and compare. On other ranks than 0: take over what rank 0 has found."""
        try:
            if self._store is None:
                return
            if self._rank:
                if self._store.check(["found"]):
                    self._adopt(json.loads(self._store.get("found"))[0])
                return
            for rank in range(1, self._num_ranks):
                while self._store.check([key := f"{rank}/{self._next[rank]}"]):
                    steps, findings, notes, ended = json.loads(self._store.get(key))
                    self._store.delete_key(key)
                    self._next[rank] += 1
                    self.notes = notes | self.notes
                    of_rank = {int(update): Facts(*facts) for update, facts in steps.items()}
                    self._receive(rank, of_rank, [Finding(*fields) for fields in findings], ended)
            if self._new:
                self._store.set("found", json.dumps([self._all, self.notes, self.missing]))
        except dist.DistError:  # the rank that hosts the store has ended
            self._store = None

    def finish(self, waits: bool) -> None:
        """Wait for the last reports of all ranks, which every rank must have posted, and give all ranks the result."""
        if self._store is None:
            return
        deadline = time.monotonic() + (store_exchange.WAITS_SECONDS if waits else 0)
        try:
            if self._rank:
                if (result := store_exchange.read(self._store, "result", 0, deadline)) is not None:
                    findings, self.notes, self.missing = result
                    self._adopt(findings)
                self._store.set(f"gone/{self._rank}", "true")
                return
            while len(self._ended) < self._num_ranks:
                self.receive()
                if time.monotonic() > deadline or self._store is None:
                    break
                time.sleep(0.002)
            self.missing = [rank for rank in range(self._num_ranks) if rank not in self._ended]
            self._compare_ends()
            if self._store is None:
                return
            self._store.set("result", json.dumps([self._all, self.notes, self.missing]))
            for rank in self._ended.keys() - {0}:  # this rank may end next, which ends the store
                store_exchange.read(self._store, f"gone/{rank}", rank, deadline)
        except dist.DistError:
            self._store = None

    def _adopt(self, findings: Sequence[Sequence[Any]]) -> None:
        for fields in findings:
            self.add(Finding(*fields))

    # ------------------------------------------------------------ on rank 0

    def _receive(self, rank: int, steps: Mapping[int, Facts], findings: Sequence[Finding], ended: int | None) -> None:
        for finding in findings:
            self.add(finding)
        if ended is not None:
            self._ended[rank] = ended
        for update, facts in steps.items():
            of_ranks = self._steps.setdefault(update, {})
            of_ranks[rank] = facts
            if len(of_ranks) == self._num_ranks:
                del self._steps[update]
                self._compare(update, of_ranks)
        while len(self._steps) > MOST_WAITING:
            del self._steps[min(self._steps)]

    def _compare(self, update: int, facts: Mapping[int, Facts]) -> None:
        self._zero = self._zero + 1 if all(of_rank.is_zero for of_rank in facts.values()) else 0
        if self._zero == ZERO_STEPS:
            first = update - ZERO_STEPS + 1
            self.add(Finding("zero-gradients", first, "every gradient is zero from this update on. Look for code that "
                             "erases gradients, and for a constant loss"))  # fmt: skip
        group = {rank: facts[rank] for rank in self._group}
        if len(group) < 2:
            return
        self.num_compared += 1
        differing = self._differing("gradients", group)
        if differing:
            self.add(Finding("gradients-differ", update, (
                f"gradients of ranks differ at the update: {differing}. They were equal before. A reduction lost or "
                "changed data on one rank, or code changes gradients there. Weights may differ from then on"
            )))  # fmt: skip
        weights = self._differing("weights", group)
        if weights and "gradients-differ" not in self._known:
            self.add(Finding("ranks-differ", update, (
                f"ranks differ: before this update, they have other weights: {weights}. Look for code that changes "
                "weights or gradients on some ranks only"
            )))  # fmt: skip
        norms = {rank: of_rank.norm for rank, of_rank in group.items() if of_rank.norm is not None}
        if len(norms) == len(group) and max(norms.values()) - min(norms.values()) > NEAR * max(norms.values()):
            least, most = (choose(norms, key=lambda rank: norms[rank]) for choose in (min, max))
            self.add(Finding("clipped-per-rank", update, (
                f"each rank clips by its own norm: {norms[least]:.4g} on rank {least}, {norms[most]:.4g} on rank "
                f"{most}. Gradients are clipped before they are averaged. Average them first, then clip"
            )))  # fmt: skip
        rows = {rank: of_rank.rows for rank, of_rank in group.items() if of_rank.rows}
        epochs = {of_rank.epoch for of_rank in group.values()}
        if overlap := self._overlap.find(update, rows, epochs.pop() if len(epochs) == 1 else 0):
            self.add(Finding("overlapping-data", *overlap))

    def _differing(self, kind: str, group: Mapping[int, Facts]) -> str:
        """Name the parameters whose bits differ between ranks. Empty if none does.

        Parameters that differ in their first comparison differ by rounding, because the examined step had compared
        them.
        """
        first, *later_ranks = [getattr(facts, kind) for facts in group.values()]
        names = []
        for number, bits in first.items():
            key = f"{kind} {number}"
            partners = [values.get(number) for values in later_ranks]
            if None in partners or key in self._unlike:
                continue
            if all(value == bits for value in partners):
                self._equal.add(key)
            elif key in self._equal:
                names.append(self._names[int(number)])
            else:
                self._unlike.add(key)
                if kind == "weights":  # a script may average gradients later
                    self.notes.setdefault("unlike", (
                        f"not checked: later differences of {self._names[int(number)]} between ranks, because its bits "
                        "differ from the beginning"
                    ))  # fmt: skip
        ranks = " and ".join(map(str, group)) if len(group) < 4 else f"{min(group)} to {max(group)}"
        return f"{terminal.count(len(names), 'tensor')} on ranks {ranks}, the first is {names[0]}" if names else ""

    def _compare_ends(self) -> None:
        ends = sorted(set(self._ended.values()))
        if len(ends) > 1 and len(self._group) > 1:
            self.notes.setdefault("ends", f"ranks made {ends[0]} to {ends[-1]} updates")
