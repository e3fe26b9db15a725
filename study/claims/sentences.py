"""What is printed of the claims: a source in three sentences and its faults, one claim in full, or what words find."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from study.claims import ledger, verdicts
from study.claims.ledger import Claim, Sentence, Source
from study.claims.verdicts import AGAIN, FAILS, HOLDS, WORDS, Verdict
from study.errors import Refusal

# The three sentences on a source, and which of its keys has each.
THREE = (("Trust", "trust"), ("Do not trust", "distrust"), ("Not known", "unknown"))
# Verdicts by what stands behind them, the strongest first, as a sentence counts them.
RUN = ("record", "execution")
UNRUN = ("theory", "arithmetic", "cited")


class Decided(NamedTuple):
    """A claim of a source with its committed verdict."""

    source: str
    claim: Claim
    verdict: Verdict


class Told(NamedTuple):
    """A sentence of a source with its readings, the headline's first; `sentence` is None where it is a claim alone."""

    source: str
    sentence: Sentence | None
    readings: list[Decided]

    @property
    def head(self) -> Decided:
        return self.readings[0]

    @property
    def word(self) -> str:
        return self.head.verdict.verdict


def read(source: str | None = None) -> list[Told]:
    """List the sentences, in the order of each text; a source that is not sorted into sentences has its claims."""
    sources, known = ledger.read(), verdicts.read()
    names = [published.source for published in sources]
    if source is not None and source not in names:
        raise Refusal(f"{source}: is no source; take one of {', '.join(names)}")
    told = []
    for published in sources:
        if source not in (None, published.source):
            continue
        of = {}
        for claim in published.claims:
            if claim.id not in known:
                raise Refusal(f"{verdicts.VERDICTS}: {claim.id}: has no verdict; {AGAIN}")
            of[claim.id] = Decided(published.source, claim, known[claim.id])
        told += [
            Told(published.source, sentence, [of[name] for name in sentence.readings])
            for sentence in published.sentences
        ] or [Told(published.source, None, [decided]) for decided in of.values()]
    return told


def faults(told: Iterable[Told]) -> list[Told]:
    """Those that matter most, the first first."""
    ranked = {one.sentence.rank: one for one in told if one.sentence is not None and one.sentence.rank is not None}
    return [ranked[rank] for rank in sorted(ranked)]


def content(told: Sequence[Told]) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "sentences": [
            {
                "source": one.source,
                "verdict": one.word,
                **(one.sentence.model_dump(exclude={"readings"}) if one.sentence else {}),
                "readings": [
                    {"id": claim.id, **claim.model_dump(mode="json", exclude={"id"}), **verdict.model_dump()}
                    for _, claim, verdict in one.readings
                ],
            }
            for one in told
        ]
    }


# ---------------------------------------------------------------- as text


def text(asked: str | None) -> str:
    """What is printed of everything, of a source, or of a claim. Raises Refusal for a name that there is not."""
    everything = read()
    if asked is None:
        ways = "zero-study claims SOURCE, zero-study claims CLAIM, zero-study claims --search WORDS"
        return "\n".join([*tally(everything), "", f"More: {ways}"])
    sources = list(dict.fromkeys(one.source for one in everything))
    if asked in sources:
        source = next(source for source in ledger.read() if source.source == asked)
        return "\n".join(_of_source(source, [one for one in everything if one.source == asked]))
    told = next((one for one in everything for decided in one.readings if decided.claim.id == asked), None)
    if told is None:
        near = difflib.get_close_matches(asked, [*sources, *(one.head.claim.id for one in everything)], n=3)
        like = f"; do you mean {' or '.join(near)}?" if near else f"; sources are {', '.join(sources)}"
        raise Refusal(f"{asked}: is no source and no claim{like}")
    return "\n".join(_of_claim(told, next(one for one in told.readings if one.claim.id == asked)))


def found(words: str) -> str:
    """The sentences in which all these words are, by their phrase, conditions, reason or name."""
    lines = []
    for one in read():
        parts = [
            part for claim in one.readings for part in (claim.claim.phrase, claim.claim.conditions, claim.claim.id)
        ]
        parts += [one.sentence.reason] if one.sentence else []
        if all(word in " ".join(parts).lower() for word in words.lower().split()):
            lines.append(f'{one.head.claim.id}: "{one.head.claim.phrase}": {one.word}')
    return "\n".join(lines or [f"no sentence has all of these words: {words}"])


def _of_source(source: Source, told: Sequence[Told]) -> list[str]:
    lines = [source.title, ""]
    lines += [f"{head}: {said}" for head, key in THREE if (said := getattr(source, key))]
    worst = faults(told)
    lines += ["", "The faults that matter most:"] if worst else []
    for number, one in enumerate(worst, 1):
        claim = one.head.claim
        assert one.sentence is not None  # as it has a rank
        lines += [
            "",
            f'{number}. "{claim.phrase}" ({claim.where}): {one.word}',
            f"   {one.sentence.reason}",
            f"   Instead: {one.sentence.remedy}",
        ]
    return [*lines, "", *tally(told)]


def _of_claim(told: Told, decided: Decided) -> list[str]:
    claim, verdict, sentence = decided.claim, decided.verdict, told.sentence
    lines = [f'"{claim.phrase}" ({decided.source}, {claim.where})', f"{verdict.verdict}: {verdict.why}"]
    if sentence is not None:
        lines += [f"reason: {sentence.reason}"] + ([f"instead: {sentence.remedy}"] if sentence.remedy else [])
    seen = verdict.observed.model_dump_json() if verdict.observed else "nothing"
    lines += [
        f"conditions: {claim.conditions}",
        f"expected: {claim.expected.model_dump_json()}",
        f"decided by: {claim.rule.model_dump_json()}",
        f"observed: {seen}",
        *(f"evidence: {line}" for line in verdict.evidence),
        *([f"note: {claim.note}"] if claim.note else []),
    ]
    lines += [
        f"corrected on {one.on}: {one.before} -> {one.after} ({one.was} -> {one.became}): {one.why}"
        for one in ledger.corrections()
        if one.id == claim.id
    ]
    others = [one.claim.id for one in told.readings if one is not decided]
    return lines + ([f"also read as: {', '.join(others)}"] if others else [])


def tally(told: Sequence[Told]) -> list[str]:
    """Tabulate verdicts, a column for each source, as Markdown; and say how many rest on a run."""
    counts = Counter((one.source, one.word) for one in told)
    names = list(dict.fromkeys(one.source for one in told))
    rows = [(word, [counts[name, word] for name in names]) for word in WORDS]
    rows = [row for row in rows if sum(row[1])]
    rows.append(("all", [sum(counts[name, word] for word in WORDS) for name in names]))
    return [
        f"| verdict | all | {' | '.join(names)} |",
        f"| --- |{' ---: |' * (len(names) + 1)}",
        *(f"| {word} | {sum(row)} | {' | '.join(map(str, row))} |" for word, row in rows),
        "",
        rested(told),
    ]


def rested(told: Sequence[Told]) -> str:
    """Say what was run for them: that a source agrees with itself is no evidence."""
    counts = Counter(one.word for one in told)

    def sum_of(words: dict[str, str], by: tuple[str, ...]) -> int:
        return sum(counts[words[kind]] for kind in by)

    measured = [counts[words["others"]] for words in (HOLDS, FAILS)]
    of_others = "{} hold and {} fail by what others measured; ".format(*measured)
    return (
        f"Of {len(told)} sentences, {sum_of(HOLDS, RUN)} are reproduced by runs here or work as printed, and "
        f"{sum_of(FAILS, RUN)} are contradicted by runs here or by today's engine; {of_others if any(measured) else ''}"
        f"{sum_of(HOLDS, UNRUN)} hold and "
        f"{sum_of(FAILS, UNRUN)} fail by theory, by what is cited or by the source's own numbers, without a run; "
        f"{counts[verdicts.OPEN]} were tried and stay open; {counts[verdicts.NEEDS]} take hardware that we lack, and "
        f"{counts[verdicts.NEEDS_SOURCE]} what the source does not say."
    )
