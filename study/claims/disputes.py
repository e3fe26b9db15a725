"""Where do sources say different things of one subject, and with which of them is the evidence?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from study.claims.say import Decided
from study.claims.verdicts import WORDS

HOLDS, UNTESTED = WORDS[0], WORDS[-1]

IN_PART, NONE_HOLDS, OPEN = "in part", "none holds", "open"


class Dispute(NamedTuple):
    """Claims of two sources, or of one, that are linked with one another, directly or through others of the same two.

    Links across all sources join most of the ledger; those between two sources stay with their subject.
    """

    sources: tuple[str, ...]
    claims: tuple[Decided, ...]
    pairs: tuple[tuple[Decided, Decided], ...]  # that are linked, of the first source and of the last

    @property
    def outcome(self) -> str:
        """The source that the evidence is with, or one of IN_PART, NONE_HOLDS and OPEN.

        It is with a source where what that says holds, and what it is linked with in the other was tested and does not.
        """
        with_one = {
            good.source
            for pair in self.pairs
            for good, bad in (pair, pair[::-1])
            if good.verdict.verdict == HOLDS and bad.verdict.verdict not in (HOLDS, UNTESTED)
        }
        if with_one:
            return IN_PART if len(self.sources) == 1 or len(with_one) == 2 else with_one.pop()
        words = {decided.verdict.verdict for decided in self.claims}
        return OPEN if words & {HOLDS, UNTESTED} else NONE_HOLDS


def disputes(claims: Sequence[Decided]) -> list[Dispute]:
    """List the disputes, those of two sources first, by the names of the sources and by the order of the claims.

    Where all holds there is none, and several readings of one phrase do not dispute one another.
    """
    by_id = {decided.claim.id: decided for decided in claims}
    neighbours: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for decided in claims:
        for link in decided.claim.links:
            other = by_id[link]
            if (decided.source, decided.claim.phrase) == (other.source, other.claim.phrase):
                continue
            sources = tuple(sorted({decided.source, other.source}))
            neighbours.setdefault(sources, {}).setdefault(decided.claim.id, []).append(link)
    linked = []
    for sources, links in neighbours.items():
        placed: set[str] = set()
        for start in links:
            if start not in placed:
                members = _reached(start, links)
                placed |= members
                linked.append(_dispute(sources, [by_id[name] for name in by_id if name in members], links, by_id))
    disputed = [dispute for dispute in linked if any(claim.verdict.verdict != HOLDS for claim in dispute.claims)]
    return sorted(disputed, key=lambda dispute: (len(dispute.sources) == 1, dispute.sources))


def _reached(start: str, links: dict[str, list[str]]) -> set[str]:
    reached, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += links[name]
    return reached


def _dispute(
    sources: tuple[str, ...], claims: list[Decided], links: dict[str, list[str]], by_id: dict[str, Decided]
) -> Dispute:
    pairs = tuple(
        (decided, by_id[link])
        for decided in claims
        for link in links[decided.claim.id]
        if (decided.source, decided.claim.id) < (by_id[link].source, link)
    )
    return Dispute(sources, tuple(claims), pairs)
