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
        words = {one.verdict.verdict for one in self.claims}
        return OPEN if words & {HOLDS, UNTESTED} else NONE_HOLDS


def disputes(found: Sequence[Decided]) -> list[Dispute]:
    """List the disputes, those of two sources first, by the names of the sources and by the order of the claims.

    Where all holds there is none, and several readings of one phrase do not dispute one another.
    """
    by_id = {one.claim.id: one for one in found}
    neighbours: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for one in found:
        for link in one.claim.links:
            other = by_id[link]
            if (one.source, one.claim.phrase) == (other.source, other.claim.phrase):
                continue
            sources = tuple(sorted({one.source, other.source}))
            neighbours.setdefault(sources, {}).setdefault(one.claim.id, []).append(link)
    made = []
    for sources, links in neighbours.items():
        seen: set[str] = set()
        for start in links:
            if start not in seen:
                members = _reached(start, links)
                seen |= members
                made.append(_dispute(sources, [one for one in found if one.claim.id in members], links, by_id))
    made = [one for one in made if any(claim.verdict.verdict != HOLDS for claim in one.claims)]
    return sorted(made, key=lambda one: (len(one.sources) == 1, one.sources))


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
        (one, by_id[link])
        for one in claims
        for link in links[one.claim.id]
        if (one.source, one.claim.id) < (by_id[link].source, link)
    )
    return Dispute(sources, tuple(claims), pairs)
