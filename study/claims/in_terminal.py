"""Format sources, claims and search results for a terminal, as wrapped lines with the summary first."""

from __future__ import annotations

import difflib
import html
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from study.claims import ledger, sentences
from study.claims.ledger import Source
from study.claims.rules.by_public_runs import ByPublicRuns
from study.claims.sentences import JudgedClaim, JudgedSentence
from study.claims.verdicts import BASES, Conclusion, stated
from zero_study import terminal
from zero_study.errors import Refusal

# Markdown in the ledger's texts: links, which are replaced by their text, and emphasis and code.
_MARKDOWN = ((re.compile(r"\[([^\]]+)\]\([^)]*\)"), r"\1"), (re.compile(r"(\*\*|`)(.+?)\1"), r"\2"))
# A JSON object inside a text, without nested objects.
_JSON = re.compile(r'\{"\w+": ("[^"{}]*"|[\w.]+)(, "\w+": ("[^"{}]*"|[\w.]+))*\}')
_NAMES = {"told": "details"}  # printed names of fields, if they differ from the names in the ledger


def text(name: str | None) -> str:
    """Return what `zero-study claims` prints about a source or a claim, or about all sources if `name` is None.

    Raises Refusal for an unknown name.
    """
    judged_sentences = sentences.read()
    if name is None:
        return "\n".join(_of_all(judged_sentences))
    sources = list(dict.fromkeys(judged.source for judged in judged_sentences))
    if name in sources:
        source = next(source for source in ledger.read() if source.source == name)
        return "\n".join(_of_source(source, [judged for judged in judged_sentences if judged.source == name]))
    for judged in judged_sentences:
        for reading in judged.readings + judged.aside:
            if reading.claim.id == name:
                return "\n".join(_of_claim(judged, reading))
    near = difflib.get_close_matches(name, [*sources, *(judged.head.claim.id for judged in judged_sentences)], n=3)
    hint = f"Do you mean {' or '.join(near)}?" if near else f"The sources are {', '.join(sources)}."
    raise Refusal(f"{name}: there is no source and no claim of this name. {hint}")


def search(query: str) -> str:
    """Return the text that `zero-study claims --search` prints: all sentences with the words of `query`."""
    shown = terminal.printable(" ".join(query.split()))
    lines = [
        _line(f'{judged.head.claim.id}: "{judged.head.claim.phrase}": {judged.word}', "  ", "    ")
        for judged in with_words(query)
    ]
    if not lines:
        return terminal.wrap(f"No sentence contains all of these words: {shown}")
    return "\n".join(
        [terminal.wrap(f"{terminal.count(len(lines), 'sentence')} with all of these words: {shown}"), *lines]
    )


def with_words(query: str) -> list[JudgedSentence]:
    """Return the sentences of all sources that contain all words of `query`.

    The words may be in the content, the phrase, the conditions, the reason or the id. Upper and lower case do not
    matter.
    """
    found = []
    for judged in sentences.read():
        parts = [judged.says, judged.why]
        parts += [part for _, claim, _ in judged.readings for part in (claim.phrase, claim.conditions, claim.id)]
        if all(word in " ".join(parts).lower() for word in query.lower().split()):
            found.append(judged)
    return found


def plain(value: str) -> str:
    """Return a text of the ledger without Markdown, HTML entities or JSON."""
    for pattern, replacement in _MARKDOWN:
        value = pattern.sub(replacement, value)
    return html.unescape(_JSON.sub(lambda match: _in_words(json.loads(match[0])), value))


def _line(value: str, indent: str = "", later_indent: str | None = None) -> str:
    return terminal.wrap(" ".join(plain(value).split()), indent, later_indent)


def _of_all(judged_sentences: Sequence[JudgedSentence]) -> list[str]:
    """Return the summary of all sources: how many sentences are decided, and a table with a row for each source."""
    ways = (
        ("zero-study claims SOURCE", "shows the verdicts on one source."),
        ("zero-study claims CLAIM", "shows one claim with its rule and evidence."),
        ("zero-study claims --search WORDS", "searches all sentences."),
    )
    return [*_tally(judged_sentences), "", *(_line(f"`{way}` {purpose}") for way, purpose in ways)]


def _of_source(source: Source, judged_sentences: Sequence[JudgedSentence]) -> list[str]:
    """Return the three statements that matter most, the answers about a source, its errors, and counts of verdicts."""
    lines = [_line(source.title), "", _line("The three statements that matter most, and whether they are right:")]
    for number, judged in enumerate(sentences.most_important(judged_sentences), 1):
        text = f"{judged.says.rstrip('.')}. {_verdict(judged)}"
        if judged.sentence is None:  # only the reason and the note say what the quotation is about
            text = (
                f'"{judged.says}" ({judged.head.claim.where}). {_verdict(judged)} {judged.why} {judged.head.claim.note}'
            )
        lines.append(_line(f"{number}. {text}", "  ", "     "))
    answers = [(title, getattr(source, key)) for title, key in sentences.ON_TOP if getattr(source, key)]
    lines += ["", *(_line(f"{title}: {answer}".replace("?:", "?"), "", "  ") for title, answer in answers)]
    faults = sentences.faults(judged_sentences)
    lines += ["", "The most important errors, each with its quotation:"] if faults else []
    for number, judged in enumerate(faults, 1):
        assert judged.sentence is not None  # as it has a rank
        lines += [
            "",
            _line(f'{number}. {judged.says} ("{judged.head.claim.phrase}")', "", "   "),
            _line(_verdict(judged), "   "),
            _line(f"Reason: {judged.sentence.reason}", "   "),
            _line(f"Instead: {judged.sentence.remedy}", "   "),
        ]
    return [*lines, *([""] if lines[-1] else []), *_tally(judged_sentences)]


def _verdict(judged: JudgedSentence) -> str:
    """Return the verdict on a sentence and its kind of evidence, as a sentence."""
    return f"Verdict: {judged.word}{f' (evidence: {judged.by})' if judged.by else ''}."


def _of_claim(judged: JudgedSentence, reading: JudgedClaim) -> list[str]:
    """Return one claim in full: the verdict first, then its sentence, its rule and its evidence."""
    claim, verdict, sentence = reading.claim, reading.verdict, judged.sentence
    basis = f" (evidence: {BASES[verdict.by]})" if verdict.by else ""
    entries = [
        ("Claim", f'"{claim.phrase}" ({reading.source}, {claim.where})'),
        ("Verdict", f"{verdict.verdict}{basis}: {verdict.why}"),
    ]
    if sentence is not None:
        entries += [("Verdict on the sentence", f"{judged.word}: {sentence.reason}")]
        entries += [("Instead", sentence.remedy)] if sentence.remedy else []
    entries += [
        ("Conditions", claim.conditions),
        ("Expected", f"{stated(claim)} (tolerance: {_values(claim.expected.tolerance)})"),
        ("Rule", _values(claim.rule)),
        ("Observed", _values(verdict.observed) if verdict.observed else "nothing"),
        *_evidence(verdict.evidence),
        *([("Note", claim.note)] if claim.note else []),
    ]
    for correction in ledger.corrections():
        if correction.id == claim.id:
            entries.append((f"Corrected on {correction.on}", f"{correction.moved}: {correction.why}"))
    for also in (*judged.readings, *judged.aside):
        if also is not reading:
            entries.append((_role(judged, also), f"{also.claim.id}: {also.verdict.verdict}"))
    return [_line(f"{title}: {value}", "", "  ") for title, value in entries]


def _role(judged: JudgedSentence, reading: JudgedClaim) -> str:
    if reading in judged.readings:
        return "Also read as"
    kind = "Related evidence" if isinstance(reading.claim.rule, ByPublicRuns) else "Strained reading"
    return f"{kind}, which decides nothing"


def _evidence(evidence: Sequence[str]) -> list[tuple[str, str]]:
    """Return one entry for all the evidence if every item is a name, otherwise one entry per item."""
    are_names = all(" " not in item for item in evidence)
    return [("Evidence", ", ".join(evidence))] if evidence and are_names else [("Evidence", item) for item in evidence]


def _values(model: Any) -> str:
    """Return the fields of a rule or an observation that are set, as "name = value"."""
    fields = model.model_dump(mode="json", exclude_none=True)
    return _in_words({name: value for name, value in fields.items() if value != ""})


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        names = [_NAMES.get(str(key), str(key)).replace("_", " ") for key in value]
        pairs = zip(names, value.values(), strict=True)
        return ", ".join(f"{name} = {_nested(inner)}" for name, inner in pairs) or "nothing"
    if isinstance(value, list):
        return ", ".join(map(_nested, value)) or "none"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _nested(value: Any) -> str:
    is_compound = isinstance(value, Mapping) or (isinstance(value, list) and len(value) > 1)
    return f"({_in_words(value)})" if is_compound else _in_words(value)


def _tally(judged_sentences: Sequence[JudgedSentence]) -> list[str]:
    """Return the number of decided sentences, a table with a row for each source, and the meaning of the verdicts."""
    by_word = Counter(judged.word for judged in judged_sentences if judged.counts)
    table = terminal.table(*sentences.counts_by_source(judged_sentences), has_ruler=True)
    legend = [
        _line(f"{kind.word} ({by_word[kind.word]}): {kind.meaning}", "  ", "    ")
        for kind in Conclusion
        if by_word[kind.word]
    ]
    return [
        _line(sentences.basis_of_verdicts(judged_sentences)),
        "",
        *table,
        "",
        "What the verdicts mean (with numbers of sentences):",
        *legend,
    ]
