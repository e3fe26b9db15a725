"""What is printed of the claims: a tally, each with its verdict and why, or everything as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from study.claims import ledger, verdicts
from study.claims.ledger import Claim
from study.claims.verdicts import AGAIN, WORDS, Verdict
from study.errors import Refusal

# How a claim is decided, by the type of its rule.
RULES = {
    "arithmetic": "the source's own numbers, or those of what it cites",
    "theory": "the models of memory, communication and time",
    "record": "committed records of runs, on a CPU",
    "execution": "its lines, given to today's engine",
    "undecidable": "not here: it takes hardware that we lack",
}


class Decided(NamedTuple):
    """A claim of a source with its committed verdict."""

    source: str
    claim: Claim
    verdict: Verdict


def committed(source: str | None = None, word: str | None = None) -> list[Decided]:
    """List the claims, of one source, with one verdict, or all. Raises Refusal for a source that there is not."""
    sources, known = ledger.read(), verdicts.read()
    names = [published.source for published in sources]
    if source is not None and source not in names:
        raise Refusal(f"--source {source}: is no source; take one of {', '.join(names)}")
    decided = []
    for published in sources:
        for claim in published.claims if source in (None, published.source) else []:
            if claim.id not in known:
                raise Refusal(f"{verdicts.VERDICTS}: {claim.id}: has no verdict; {AGAIN}")
            if word in (None, known[claim.id].verdict):
                decided.append(Decided(published.source, claim, known[claim.id]))
    return decided


def content(decided: Sequence[Decided]) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "claims": [
            {"id": claim.id, "source": source, **claim.model_dump(mode="json", exclude={"id"}), **verdict.model_dump()}
            for source, claim, verdict in decided
        ]
    }


def text(decided: Sequence[Decided]) -> str:
    """Print the tally, then each claim."""
    lines = tally(decided)
    for source, claim, verdict in decided:
        lines += [
            "",
            f"{claim.id}: {verdict.verdict}",
            f'  "{claim.phrase}" ({source}, {claim.where})',
            f"  {verdict.why}",
        ]
    return "\n".join(lines)


def tally(decided: Sequence[Decided]) -> list[str]:
    """Tabulate verdicts by source, as Markdown, and say by which rules claims hold."""
    counts = Counter((source, verdict.verdict) for source, _, verdict in decided)
    names = list(dict.fromkeys(source for source, _, _ in decided))
    rows = [(name, [counts[name, word] for word in WORDS]) for name in names]
    rows.append(("all", [sum(counts[name, word] for name in names) for word in WORDS]))
    return [
        f"| source | {' | '.join(WORDS)} | claims |",
        f"| --- |{' ---: |' * (len(WORDS) + 1)}",
        *(f"| {name} | {' | '.join(map(str, row))} | {sum(row)} |" for name, row in rows),
        "",
        _by_rule(decided),
    ]


def _by_rule(decided: Sequence[Decided]) -> str:
    """Say how much of what holds rests on what: that a source agrees with itself is no evidence of a run."""
    counts = Counter(claim.rule.type for _, claim, verdict in decided if verdict.verdict == "replicated")
    said = "; ".join(f"{count} by {rule} ({RULES[rule]})" for rule, count in counts.most_common())
    return f"Replicated: {said or 'none'}."
