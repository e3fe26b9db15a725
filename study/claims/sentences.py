"""Read the sentences of the ledger with their verdicts, and summarize them for pages, notebooks and `--json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from study.claims import ledger, verdicts
from study.claims.ledger import Claim, Sentence, Source, Standing
from study.claims.verdicts import AGAIN, BASES, Conclusion, Verdict
from zero_study import terminal
from zero_study.errors import Refusal

# The headings of the answers about a source, each with the key of Source that contains the answer.
ON_TOP = (
    ("Can I believe this source?", "believe"),
    ("Trust", "trust"),
    ("Do not trust", "distrust"),
    ("Not known", "unknown"),
)


# The kinds of evidence as they are named in a sentence.
_BASES_IN_WORDS = {
    "our runs": "this project's runs", "today's engines": "executions with current engines",
    "others' runs": "runs of others", "what it cites": "sources that are cited", "a known fact": "known facts",
    "its own numbers": "the source's own numbers",
}  # fmt: skip


class JudgedClaim(NamedTuple):
    """A claim with the name of its source and its committed verdict."""

    source: str
    claim: Claim
    verdict: Verdict


class JudgedSentence(NamedTuple):
    """A sentence of a source with its claims and their verdicts. The first claim is the one whose phrase is quoted.

    `sentence` is None if the source has no sentences. Then `readings` has one of its claims.
    """

    source: str
    sentence: Sentence | None
    readings: list[JudgedClaim]
    aside: list[JudgedClaim]  # strained readings, which do not affect the verdict

    @property
    def head(self) -> JudgedClaim:
        return self.readings[0]

    @property
    def says(self) -> str:
        """The content of the sentence in plain words, or the quoted phrase if that is plain enough."""
        return (self.sentence and self.sentence.says) or self.head.claim.phrase

    @property
    def word(self) -> str:
        """The verdict on the sentence, as words such as "contradicted"."""
        return verdicts.headline([reading.verdict for reading in self.readings])[0]

    @property
    def conclusion(self) -> Conclusion:
        return Conclusion.of(self.word)

    @property
    def by(self) -> str:
        """The kind of evidence that decides the verdict. Empty if this project has no evidence."""
        basis = verdicts.headline([reading.verdict for reading in self.readings])[1]
        return BASES[basis] if basis else ""

    @property
    def why(self) -> str:
        reason = self.sentence.reason if self.sentence else self.head.verdict.why
        if not self.undecided:
            return reason
        return " ".join([reason, "A part is not decided.", *(reading.verdict.why for reading in self.undecided)])

    @property
    def undecided(self) -> list[JudgedClaim]:
        """The undecided claims of a sentence that counts as correct because of its other claims."""
        if self.conclusion.standing != "yes":
            return []
        return [reading for reading in self.readings if not Conclusion.of(reading.verdict.verdict).is_decided]

    @property
    def counts(self) -> bool:
        """Whether statistics include the sentence. They leave out small mistakes that mislead nobody."""
        return self.sentence is None or not self.sentence.petty


def read(source: str | None = None) -> list[JudgedSentence]:
    """Return the sentences of one source with their verdicts, in the order of the text. None returns all sources.

    Each claim of a source without sentences is returned as a sentence of its own. Raises Refusal for an unknown source
    and for a claim without a verdict.
    """
    sources, committed = ledger.read(), verdicts.read()
    names = [published.source for published in sources]
    if source is not None and source not in names:
        raise Refusal(f"{source}: there is no source of this name. The sources are {', '.join(names)}.")
    selected = [published for published in sources if source in (None, published.source)]
    return [sentence for published in selected for sentence in _sentences_of(published, committed)]


def _sentences_of(source: Source, committed: Mapping[str, Verdict]) -> list[JudgedSentence]:
    name, judged = source.source, {}
    for claim in source.claims:
        if claim.id not in committed:
            raise Refusal(f"{verdicts.VERDICTS}: {claim.id}: this claim has no verdict. {AGAIN}")
        judged[claim.id] = JudgedClaim(name, claim, committed[claim.id])
    if not source.sentences:
        return [JudgedSentence(name, None, [claim], []) for claim in judged.values()]
    return [
        JudgedSentence(name, sentence, [judged[i] for i in sentence.readings], [judged[i] for i in sentence.aside])
        for sentence in source.sentences
    ]


def faults(sentences: Iterable[JudgedSentence]) -> list[JudgedSentence]:
    """Return the sentences that the ledger lists as the most important faults, in the order of their ranks."""
    ranked = {judged.sentence.rank: judged for judged in sentences if judged.sentence and judged.sentence.rank}
    return [ranked[rank] for rank in sorted(ranked)]


def most_important(sentences: Sequence[JudgedSentence], number: int = 3) -> list[JudgedSentence]:
    """Return the sentences that matter most to a reader: ranked faults first, then other sentences with a verdict.

    Of the other sentences, the wrong ones come first, then those with the strongest evidence, in the order of the text.
    """
    first = faults(sentences)
    by_strength = [*BASES.values()]
    others = [each for each in sentences if each not in first and each.counts and each.conclusion.is_decided]
    others.sort(key=lambda each: (each.conclusion.standing == "yes", by_strength.index(each.by)))
    by_text: dict[str, JudgedSentence] = {}  # claims of one quotation count once
    for each in [*first, *others]:
        by_text.setdefault(each.says, each)
    return list(by_text.values())[:number]


def content(sentences: Sequence[JudgedSentence]) -> dict[str, Any]:
    """Return sentences with their claims and verdicts as a JSON object, for `--json`."""

    def of(reading: JudgedClaim) -> dict[str, Any]:
        _, claim, verdict = reading
        return {"id": claim.id, **claim.model_dump(mode="json", exclude={"id"}), **verdict.model_dump()}

    return {
        "sentences": [
            {
                "source": judged.source,
                "verdict": judged.word,
                "by": judged.by,
                "undecided": [reading.claim.id for reading in judged.undecided],
                **(judged.sentence.model_dump(exclude={"readings", "aside"}) if judged.sentence else {}),
                "readings": [of(reading) for reading in judged.readings],
                "aside": [of(reading) for reading in judged.aside],
            }
            for judged in sentences
        ]
    }


# ---------------------------------------------------------------- for pages and notebooks


def counts_by_source(sentences: Sequence[JudgedSentence]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the titles and rows of a table that counts the sentences of each source by verdict."""
    by_standing = Counter((judged.source, judged.conclusion.standing) for judged in sentences if judged.counts)
    names = dict.fromkeys(judged.source for judged in sentences)
    rows = [(name, *(by_standing[name, standing] for standing in get_args(Standing))) for name in names]
    rows += [("all", *map(sum, list(zip(*rows, strict=True))[1:]))] if len(rows) > 1 else []
    titles = ["source", "agrees", "in part", "contradicted", "undecided", "all"]
    return titles, [(*row, sum(row[1:])) for row in rows]


def tally(sentences: Sequence[JudgedSentence]) -> list[str]:
    """Return a Markdown table that counts the sentences of each source by verdict."""
    by_word = Counter(judged.word for judged in sentences if judged.counts)
    legend = [f"- **{kind.word}** ({by_word[kind.word]}): {kind.meaning}" for kind in Conclusion]
    return [
        *terminal.markdown(*counts_by_source(sentences)),
        "",
        *legend,
        "",
        basis_of_verdicts(sentences),
    ]


def basis_of_verdicts(sentences: Sequence[JudgedSentence]) -> str:
    """Return a text that says how many sentences are decided by each kind of evidence."""
    counted = [judged for judged in sentences if judged.counts]
    by_basis = Counter(judged.by for judged in counted if judged.conclusion.is_decided)
    behind = ", ".join(
        f"{_BASES_IN_WORDS.get(name, name)} ({by_basis[name]})" for name in BASES.values() if by_basis[name]
    )
    num_slips = len(sentences) - len(counted)
    slips = f" We do not count {terminal.count(num_slips, 'sentence')} with small mistakes that mislead nobody."
    decided = f"{sum(by_basis.values())} of {len(counted)} sentences have a definite verdict."
    return f"{decided} These verdicts rest on: {behind or 'nothing'}.{slips if num_slips else ''}"
