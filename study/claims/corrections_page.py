"""Make the site's page of corrections: what the authors of each publication could correct, and changed verdicts."""

from __future__ import annotations

import re
from collections import Counter

from study.claims import ledger, sentences
from study.claims.ledger import Arithmetic, Claim, OfRecords, Source, Theory
from study.claims.rules.by_public_runs import ByPublicRuns
from study.claims.sentences import JudgedClaim, JudgedSentence
from study.claims.verdicts import Conclusion
from zero_study import terminal
from zero_study.files import ROOT

_INTRODUCTION = (
    "# Corrections for authors",
    "This page is for the authors of the texts about ZeRO that this project examined. For each text, the page lists "
    "the most important wrong sentences, the worst first. Below each sentence are the reason why it is wrong, what to "
    "write or do instead, and links to the evidence.",
    "The names of the links say what the evidence is. *Predicted* means that our models of memory and time decide, and "
    "nothing was run. *Runs* and *executed* mean runs of small models and of the text's own code on a CPU, which say "
    "nothing about speed on GPUs.",
    "If you disagree, [dispute the verdict](../docs/CONTRIBUTING.md#dispute-a-verdict).",
)

# The page that shows the records that a function of by_records reads, if the rule does not name a study.
_PAGE_OF_FUNCTION = {
    "volume": "cpu/communication.md", "volume_ratio": "cpu/communication.md", "reduced_ratio": "cpu/communication.md",
    "uses_collective": "cpu/communication.md", "state_bytes_per_parameter": "cpu/model_states.md",
    "state_ratio": "cpu/model_states.md", "peak_ratio": "cpu/peaks_real.md", "different_bits": "losses.md",
    "accumulation_difference": "cpu/parity.md", "protocol_effect": "claims.md",
}  # fmt: skip
# What such a page shows, as the text of a link to it.
_SHOWN = {
    "cpu/communication.md": "messages", "cpu/model_states.md": "model states", "cpu/peaks_real.md": "peaks",
    "losses.md": "losses", "cpu/parity.md": "losses", "claims.md": "repaired program",
}  # fmt: skip
_PAPERS = {
    "infinity": "https://arxiv.org/abs/2104.07857", "offload": "https://arxiv.org/abs/2101.06840",
    "": "https://arxiv.org/abs/1910.02054",
}  # fmt: skip

_COMMAND = re.compile(r"(?<=[:.] )(zero-study|python) [^`]+$")  # at the end of a text, without backticks


def text() -> str:
    """Return the page as Markdown."""
    lines = ["\n\n".join(_INTRODUCTION)]
    judged = sentences.read()
    for source in ledger.read():
        if source.sentences:
            lines += ["", *_of_source(source, [each for each in judged if each.source == source.source])]
    return "\n".join([*lines, "", *_of_verdicts()]) + "\n"


def _of_source(source: Source, judged: list[JudgedSentence]) -> list[str]:
    """Return the heading of a source, the number of its faults, and a list of the most important ones."""
    faults = sentences.faults(judged)
    wrong = [each for each in judged if each.counts and each.conclusion.standing in ("no", "part")]
    others = [each for each in wrong if each not in faults]
    page = ROOT / "reports" / f"{source.source}.ipynb"
    are = "is" if len(wrong) == 1 else "are"
    count = f"{len(wrong)} of {sum(each.counts for each in judged)} sentences {are} wrong, or right only in part"
    shown = f"the {len(faults)} most important" if others else "it" if len(wrong) == 1 else "all of them"
    below = f"{count}. The list has {shown}."
    if others:
        numbers = ", ".join(map(str, dict.fromkeys(each.sentence.line for each in others if each.sentence)))
        where = f"[The page of this text]({page.name}) explains" if page.exists() else "The ledger explains"
        below += f" {where} the others: line{'s' if ',' in numbers else ''} {numbers}."
    title = f"[{source.title}]({source.url})" if source.url else source.title
    items = [line for number, fault in enumerate(faults, 1) for line in _item(number, fault)]
    return [f"## {source.source}", "", f"{title}. {below}", *items]


def _item(number: int, fault: JudgedSentence) -> list[str]:
    """Return a numbered item of a list: the wrong sentence, the reason, and what to write or do instead.

    The page has no table, because a table of these texts cannot be read on a phone.
    """
    assert fault.sentence is not None  # as it has a rank
    links = dict.fromkeys(
        _evidence(reading) for reading in fault.readings if Conclusion.of(reading.verdict.verdict).standing == "no"
    )
    says, reason, remedy = map(_inline, (fault.says, fault.sentence.reason, fault.sentence.remedy or ""))
    remedy = _COMMAND.sub(r"`\g<0>`", remedy)
    indent = " " * 4  # Python-Markdown and CommonMark both take a paragraph with this indent as part of the item
    return [
        "",
        f"{number}. **{says}** (line {fault.sentence.line})",
        "",
        f"{indent}{reason}",
        "",
        f"{indent}*Instead:* {remedy} *Evidence:* {', '.join(links)}",
    ]


def _inline(content: str) -> str:
    """Return a text on one line, without TeX, in which no character begins markup except for code in backticks."""
    content = re.sub(r"\$([^$]+)\$", r"\1", content)
    return terminal.escape_markdown(content).replace("*", "\\*")


def _evidence(reading: JudgedClaim) -> str:
    """Return a Markdown link to the evidence for a claim, with the kind of the evidence as its text."""
    claim, basis = reading.claim, reading.verdict.by
    ledger_file = f"../study/claims/ledger/{reading.source}.yaml"
    match basis:
        case "record":
            page = _of_records(claim)
            return f"[runs: {_SHOWN.get(page, 'records')}]({page})"
        case "execution":
            return "[executed](cpu/published/snippets.json)"
        case "others" if isinstance(claim.rule, ByPublicRuns):
            return "[measured by others](public/README.md)"
        case "others":
            return "[measured by others](../zero_study/theory/measured_by_others/published.yaml)"
        case "cited":
            return f"[paper]({_paper(claim)})"
        case "theory":
            return "[predicted](planner-accuracy.md)"
        case "fact":
            return f"[known fact]({ledger_file})"
    return f"[its own numbers]({ledger_file})"


def _of_records(claim: Claim) -> str:
    """Return the page about the records that decide a claim, or the folder of the records if there is no page."""
    assert isinstance(claim.rule, OfRecords)
    study = claim.rule.arguments.get("study")
    if study is None:
        return _PAGE_OF_FUNCTION[claim.rule.function]
    return "losses.md" if study.startswith("learn") else f"cpu/records/{study}"


def _paper(claim: Claim) -> str:
    """Return the address of the paper whose number or formula the rule uses."""
    formula = claim.rule.formula if isinstance(claim.rule, Arithmetic) else ""
    formula = claim.rule.function if isinstance(claim.rule, Theory) else formula
    return next(address for word, address in _PAPERS.items() if word in formula)


def _of_verdicts() -> list[str]:
    """Return the section on changed verdicts: how many there are, and where the reason for each is written."""
    corrections = ledger.corrections()
    days = [correction.on for correction in corrections]
    words = {conclusion.word for conclusion in Conclusion}
    moved = Counter(_direction(each) for each in corrections if {each.was, each.became} <= words)
    return [
        "## Verdicts that changed",
        "",
        f"We wrote most expected values when we already knew the results, and made {len(corrections)} corrections "
        f"between {min(days)} and {max(days)}. A correction changes an expected value or a rule, adds or removes a "
        "claim, or decides a sentence again. For "
        f"{sum(moved.values())} corrections, the verdicts before and after can be compared: {moved['better']} became "
        f"better for the examined text, {moved['worse']} became worse, and {moved['same']} did not change. The file "
        "[corrections.yaml](../study/claims/corrections.yaml) has the reason for each correction, and `zero-study "
        "claims CLAIM` prints those of one claim.",
    ]


def _direction(correction: ledger.Correction) -> str:
    """Return whether a correction made a verdict better or worse for the source."""
    order = {"no": 0, "part": 1, "open": 2, "yes": 3}
    was, became = (order[Conclusion.of(word or "").standing] for word in (correction.was, correction.became))
    return "same" if was == became else "better" if became > was else "worse"
