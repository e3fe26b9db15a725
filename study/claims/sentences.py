"""What is printed of the claims: a source in four answers and its faults, one claim in full, or what words find."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from study import formatting
from study.claims import ledger, verdicts
from study.claims.ledger import Claim, Sentence, Source
from study.claims.verdicts import AGAIN, BY, COMES_TO, MEANING, Verdict
from study.errors import Refusal

# The answers on a source, and which of its keys has each.
ON_TOP = (
    ("Can I believe it?", "believe"), ("Trust", "trust"), ("Do not trust", "distrust"), ("Not known", "unknown"),
)  # fmt: skip


class Decided(NamedTuple):
    """A claim of a source with its committed verdict."""

    source: str
    claim: Claim
    verdict: Verdict


class Told(NamedTuple):
    """A sentence of a source with its readings, the quoted first; `sentence` is None where it is a claim alone."""

    source: str
    sentence: Sentence | None
    readings: list[Decided]
    aside: list[Decided]  # strained readings, which decide nothing

    @property
    def head(self) -> Decided:
        return self.readings[0]

    @property
    def says(self) -> str:
        """What it says, in plain words."""
        return (self.sentence and self.sentence.says) or self.head.claim.phrase

    @property
    def word(self) -> str:
        return verdicts.headline([one.verdict for one in self.readings])[0]

    @property
    def by(self) -> str:
        """By what it was decided, or tried; empty where it was not."""
        by = verdicts.headline([one.verdict for one in self.readings])[1]
        return BY[by] if by else ""

    @property
    def why(self) -> str:
        return self.sentence.reason if self.sentence else self.head.verdict.why

    @property
    def counts(self) -> bool:
        """Whether it is more than a slip."""
        return self.sentence is None or not self.sentence.petty


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
            Told(published.source, one, [of[name] for name in one.readings], [of[name] for name in one.aside])
            for one in published.sentences
        ] or [Told(published.source, None, [decided], []) for decided in of.values()]
    return told


def faults(told: Iterable[Told]) -> list[Told]:
    """Those that matter most, the first first."""
    ranked = {one.sentence.rank: one for one in told if one.sentence is not None and one.sentence.rank is not None}
    return [ranked[rank] for rank in sorted(ranked)]


def content(told: Sequence[Told]) -> dict[str, Any]:
    """Everything, for `--json`."""

    def of(decided: Decided) -> dict[str, Any]:
        _, claim, verdict = decided
        return {"id": claim.id, **claim.model_dump(mode="json", exclude={"id"}), **verdict.model_dump()}

    return {
        "sentences": [
            {
                "source": one.source,
                "verdict": one.word,
                "by": one.by,
                **(one.sentence.model_dump(exclude={"readings", "aside"}) if one.sentence else {}),
                "readings": [of(each) for each in one.readings],
                "aside": [of(each) for each in one.aside],
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
    told = next((one for one in everything for each in one.readings + one.aside if each.claim.id == asked), None)
    if told is None:
        near = difflib.get_close_matches(asked, [*sources, *(one.head.claim.id for one in everything)], n=3)
        like = f"; do you mean {' or '.join(near)}?" if near else f"; sources are {', '.join(sources)}"
        raise Refusal(f"{asked}: is no source and no claim{like}")
    return "\n".join(_of_claim(told, next(one for one in told.readings + told.aside if one.claim.id == asked)))


def found(asked: str) -> str:
    """The sentences in which all these words are, by their phrase, conditions, reason or name."""
    lines = []
    for one in read():
        parts = [one.says, one.why]
        parts += [part for _, claim, _ in one.readings for part in (claim.phrase, claim.conditions, claim.id)]
        if all(word in " ".join(parts).lower() for word in asked.lower().split()):
            lines.append(f'{one.head.claim.id}: "{one.head.claim.phrase}": {one.word}')
    return "\n".join(lines or [f"no sentence has all of these words: {asked}"])


def _of_source(source: Source, told: Sequence[Told]) -> list[str]:
    lines = [source.title, ""]
    lines += [f"{head}: {said}".replace("?:", "?") for head, key in ON_TOP if (said := getattr(source, key))]
    worst = faults(told)
    lines += ["", "The faults that matter most:"] if worst else []
    for number, one in enumerate(worst, 1):
        assert one.sentence is not None  # as it has a rank
        lines += [
            "",
            f'{number}. {one.says} ("{one.head.claim.phrase}"): {one.word} ({one.by})',
            f"   {one.sentence.reason}",
            f"   Instead: {one.sentence.remedy}",
        ]
    return [*lines, "", *tally(told)]


def _of_claim(told: Told, decided: Decided) -> list[str]:
    claim, verdict, sentence = decided.claim, decided.verdict, told.sentence
    by = f" ({BY[verdict.by]})" if verdict.by else ""
    lines = [f'"{claim.phrase}" ({decided.source}, {claim.where})', f"{verdict.verdict}{by}: {verdict.why}"]
    if sentence is not None:
        lines += [f"the sentence: {told.word}: {sentence.reason}"]
        lines += [f"instead: {sentence.remedy}"] if sentence.remedy else []
    seen = verdict.observed.model_dump_json() if verdict.observed else "nothing"
    lines += [
        f"conditions: {claim.conditions}",
        f"expected: {claim.expected.model_dump_json()}",
        f"decided by: {claim.rule.model_dump_json()}",
        f"observed: {seen}",
        *(f"evidence: {line}" for line in verdict.evidence),
        *([f"note: {claim.note}"] if claim.note else []),
    ]
    lines += [f"corrected on {one.on}: {one.moved}: {one.why}" for one in ledger.corrections() if one.id == claim.id]
    for name, readings in (("also read as", told.readings), ("strained reading, decides nothing", told.aside)):
        lines += [f"{name}: {one.claim.id}: {one.verdict.verdict}" for one in readings if one is not decided]
    return lines


def tally(told: Sequence[Told]) -> list[str]:
    """Tabulate what sentences come to, a row for each source, as Markdown; say how many have which verdict."""
    counted = [one for one in told if one.counts]
    of, by_word = Counter((one.source, COMES_TO.get(one.word)) for one in counted), Counter(one.word for one in counted)
    names = list(dict.fromkeys(one.source for one in told))
    rows = [(name, *(of[name, held] for held in ("yes", "part", "no", None))) for name in names]
    rows += [("all", *map(sum, list(zip(*rows, strict=True))[1:]))] if len(rows) > 1 else []
    head = ["source", "agrees", "in part", "contradicted", "undecided", "all"]
    legend = [f"- **{word}** ({by_word[word]}): {meaning}" for word, meaning in MEANING.items()]
    return [*formatting.markdown(head, [(*row, sum(row[1:])) for row in rows]), "", *legend, "", rested(told)]


def rested(told: Sequence[Told]) -> str:
    """Say how many are decided, and what stands behind them: that a source agrees with itself is no evidence."""
    counted = [one for one in told if one.counts]
    by = Counter(one.by for one in counted if one.word in COMES_TO)
    behind = ", ".join(f"{name} for {by[name]}" for name in BY.values() if by[name])
    slips = len(told) - len(counted)
    left = f" Slips that mislead nobody, not counted: {slips}." if slips else ""
    return f"Of {len(counted)} sentences {sum(by.values())} are decided. Behind them stand: {behind or 'none'}.{left}"
