"""Make what `zero-study claims --json` prints: sentences of publications, or the verdicts that must be corrected."""

from __future__ import annotations

from collections.abc import Mapping

from study.claims import in_terminal, ledger, sentences
from zero_study.answers import envelope
from zero_study.answers.envelope import Answer
from zero_study.verdict import Verdict

OUTDATED = "claims/differing-verdict"


def of_sentences(name: str | None, search: str | None = None) -> Answer:
    """Return the answer with the sentences of a source, of a claim, of a search, or of all sources.

    Raises Refusal if there is no such source or claim.
    """
    if search is not None:
        matching = in_terminal.with_words(search)
    elif name is None or name in [source.source for source in ledger.read()]:
        matching = sentences.read(name)
    else:
        in_terminal.text(name)  # raises Refusal for an unknown name
        matching = [
            judged
            for judged in sentences.read()
            if name in [reading.claim.id for reading in judged.readings + judged.aside]
        ]
    return envelope.answer("claims", None, (), sentences.content(matching))


def of_check(verdict: Verdict, wrong: Mapping[str, str]) -> Answer:
    """Return the answer of --check: each claim whose verdict differs from the committed one or from the ledger."""
    outdated = [envelope.Finding(OUTDATED, "error", f"{message}.", name=name) for name, message in wrong.items()]
    return envelope.answer("claims", verdict, outdated, {"sentences": []})
