"""What is printed of the claims: a source in four answers and its faults, one claim in full, or what words find."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from study import formatting
from study.claims import ledger, verdicts
from study.claims.ledger import Claim, Sentence, Source, Standing
from study.claims.verdicts import AGAIN, BASES, Conclusion, Verdict
from study.errors import Refusal

# The answers on a source, and which of its keys has each.
ON_TOP = (
    ("Can I believe it?", "believe"), ("Trust", "trust"), ("Do not trust", "distrust"), ("Not known", "unknown"),
)  # fmt: skip


class JudgedClaim(NamedTuple):
    """A claim of a source with its committed verdict."""

    source: str
    claim: Claim
    verdict: Verdict


class JudgedSentence(NamedTuple):
    """A sentence of a source with its readings, the quoted first; `sentence` is None where it is a claim alone."""

    source: str
    sentence: Sentence | None
    readings: list[JudgedClaim]
    aside: list[JudgedClaim]  # strained readings, which decide nothing

    @property
    def head(self) -> JudgedClaim:
        return self.readings[0]

    @property
    def says(self) -> str:
        """What it says, in plain formatting."""
        return (self.sentence and self.sentence.says) or self.head.claim.phrase

    @property
    def word(self) -> str:
        """The word of its verdict."""
        return verdicts.headline([reading.verdict for reading in self.readings])[0]

    @property
    def conclusion(self) -> Conclusion:
        return Conclusion.of(self.word)

    @property
    def by(self) -> str:
        """By what it was decided, or tried; empty where it was not."""
        basis = verdicts.headline([reading.verdict for reading in self.readings])[1]
        return BASES[basis] if basis else ""

    @property
    def why(self) -> str:
        return self.sentence.reason if self.sentence else self.head.verdict.why

    @property
    def counts(self) -> bool:
        """Whether it is more than a slip."""
        return self.sentence is None or not self.sentence.petty


def read(source: str | None = None) -> list[JudgedSentence]:
    """List the sentences, in the order of each text; a source that is not sorted into sentences has its claims."""
    sources, committed = ledger.read(), verdicts.read()
    names = [published.source for published in sources]
    if source is not None and source not in names:
        raise Refusal(f"{source}: is no source; take one of {', '.join(names)}")
    selected = [published for published in sources if source in (None, published.source)]
    return [sentence for published in selected for sentence in _sentences_of(published, committed)]


def _sentences_of(source: Source, committed: Mapping[str, Verdict]) -> list[JudgedSentence]:
    name, judged = source.source, {}
    for claim in source.claims:
        if claim.id not in committed:
            raise Refusal(f"{verdicts.VERDICTS}: {claim.id}: has no verdict; {AGAIN}")
        judged[claim.id] = JudgedClaim(name, claim, committed[claim.id])
    if not source.sentences:
        return [JudgedSentence(name, None, [claim], []) for claim in judged.values()]
    return [
        JudgedSentence(name, sentence, [judged[i] for i in sentence.readings], [judged[i] for i in sentence.aside])
        for sentence in source.sentences
    ]


def faults(sentences: Iterable[JudgedSentence]) -> list[JudgedSentence]:
    """List the faults that matter most, the most important first."""
    ranked = {judged.sentence.rank: judged for judged in sentences if judged.sentence and judged.sentence.rank}
    return [ranked[rank] for rank in sorted(ranked)]


def content(sentences: Sequence[JudgedSentence]) -> dict[str, Any]:
    """Give every sentence with its readings and verdicts, for `--json`."""

    def of(reading: JudgedClaim) -> dict[str, Any]:
        _, claim, verdict = reading
        return {"id": claim.id, **claim.model_dump(mode="json", exclude={"id"}), **verdict.model_dump()}

    return {
        "sentences": [
            {
                "source": judged.source,
                "verdict": judged.word,
                "by": judged.by,
                **(judged.sentence.model_dump(exclude={"readings", "aside"}) if judged.sentence else {}),
                "readings": [of(reading) for reading in judged.readings],
                "aside": [of(reading) for reading in judged.aside],
            }
            for judged in sentences
        ]
    }


# ---------------------------------------------------------------- as text


def text(name: str | None) -> str:
    """Print everything (without a name), a source, or a claim. Raises Refusal for an unknown name."""
    sentences = read()
    if name is None:
        ways = "zero-study claims SOURCE, zero-study claims CLAIM, zero-study claims --search WORDS"
        return "\n".join([*tally(sentences), "", f"More: {ways}"])
    sources = list(dict.fromkeys(judged.source for judged in sentences))
    if name in sources:
        source = next(source for source in ledger.read() if source.source == name)
        return "\n".join(_of_source(source, [judged for judged in sentences if judged.source == name]))
    for judged in sentences:
        for reading in judged.readings + judged.aside:
            if reading.claim.id == name:
                return "\n".join(_of_claim(judged, reading))
    near = difflib.get_close_matches(name, [*sources, *(judged.head.claim.id for judged in sentences)], n=3)
    like = f"; do you mean {' or '.join(near)}?" if near else f"; sources are {', '.join(sources)}"
    raise Refusal(f"{name}: is no source and no claim{like}")


def search(query: str) -> str:
    """List the sentences in which all these words are, by their phrase, conditions, reason or name."""
    lines = []
    for judged in read():
        parts = [judged.says, judged.why]
        parts += [part for _, claim, _ in judged.readings for part in (claim.phrase, claim.conditions, claim.id)]
        if all(word in " ".join(parts).lower() for word in query.lower().split()):
            lines.append(f'{judged.head.claim.id}: "{judged.head.claim.phrase}": {judged.word}')
    return "\n".join(lines or [f"no sentence has all of these words: {query}"])


def _of_source(source: Source, sentences: Sequence[JudgedSentence]) -> list[str]:
    lines = [source.title, ""]
    lines += [f"{head}: {answer}".replace("?:", "?") for head, key in ON_TOP if (answer := getattr(source, key))]
    worst = faults(sentences)
    lines += ["", "The faults that matter most:"] if worst else []
    for number, judged in enumerate(worst, 1):
        assert judged.sentence is not None  # as it has a rank
        lines += [
            "",
            f'{number}. {judged.says} ("{judged.head.claim.phrase}"): {judged.word} ({judged.by})',
            f"   {judged.sentence.reason}",
            f"   Instead: {judged.sentence.remedy}",
        ]
    return [*lines, "", *tally(sentences)]


def _of_claim(judged: JudgedSentence, reading: JudgedClaim) -> list[str]:
    claim, verdict, sentence = reading.claim, reading.verdict, judged.sentence
    basis = f" ({BASES[verdict.by]})" if verdict.by else ""
    lines = [f'"{claim.phrase}" ({reading.source}, {claim.where})', f"{verdict.verdict}{basis}: {verdict.why}"]
    if sentence is not None:
        lines += [f"the sentence: {judged.word}: {sentence.reason}"]
        lines += [f"instead: {sentence.remedy}"] if sentence.remedy else []
    observation = verdict.observed.model_dump_json() if verdict.observed else "nothing"
    lines += [
        f"conditions: {claim.conditions}",
        f"expected: {claim.expected.model_dump_json()}",
        f"decided by: {claim.rule.model_dump_json()}",
        f"observed: {observation}",
        *(f"evidence: {line}" for line in verdict.evidence),
        *([f"note: {claim.note}"] if claim.note else []),
    ]
    lines += [
        f"corrected on {correction.on}: {correction.moved}: {correction.why}"
        for correction in ledger.corrections()
        if correction.id == claim.id
    ]
    for kind, claims in (("also read as", judged.readings), ("strained reading, decides nothing", judged.aside)):
        lines += [f"{kind}: {also.claim.id}: {also.verdict.verdict}" for also in claims if also is not reading]
    return lines


def tally(sentences: Sequence[JudgedSentence]) -> list[str]:
    """Tabulate what sentences come to, a row for each source, as Markdown; say how many have which verdict."""
    counted = [judged for judged in sentences if judged.counts]
    by_standing = Counter((judged.source, judged.conclusion.standing) for judged in counted)
    by_word = Counter(judged.word for judged in counted)
    names = list(dict.fromkeys(judged.source for judged in sentences))
    rows = [(name, *(by_standing[name, standing] for standing in get_args(Standing))) for name in names]
    rows += [("all", *map(sum, list(zip(*rows, strict=True))[1:]))] if len(rows) > 1 else []
    head = ["source", "agrees", "in part", "contradicted", "undecided", "all"]
    legend = [f"- **{kind.word}** ({by_word[kind.word]}): {kind.meaning}" for kind in Conclusion]
    return [*formatting.markdown(head, [(*row, sum(row[1:])) for row in rows]), "", *legend, "", rested(sentences)]


def rested(sentences: Sequence[JudgedSentence]) -> str:
    """Say how many are decided, and what stands behind them: that a source agrees with itself is no evidence."""
    counted = [judged for judged in sentences if judged.counts]
    by_basis = Counter(judged.by for judged in counted if judged.conclusion.is_decided)
    behind = ", ".join(f"{name} for {by_basis[name]}" for name in BASES.values() if by_basis[name])
    num_slips = len(sentences) - len(counted)
    slips = f" Slips that mislead nobody, not counted: {num_slips}." if num_slips else ""
    decided = f"Of {len(counted)} sentences {sum(by_basis.values())} are decided."
    return f"{decided} Behind them stand: {behind or 'none'}.{slips}"
