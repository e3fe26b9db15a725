"""What became of each claim, as a page: the tally, the disputes, and a list that can be filtered."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import get_args
from urllib.parse import urlencode

from study.claims import disputes, ledger
from study.claims.ledger import Arithmetic, Claim, Execution, Undecidable
from study.claims.say import RULES, Decided
from study.claims.verdicts import WORDS, Seen
from study.report import markup
from study.report.markup import Html, escape
from study.report.words import count

MEANINGS = {
    "replicated": "what was observed lies within the tolerance. Some were moved once results were known, and not every "
    "note says so.",
    "differs": "theory, records or an execution give something else.",
    "inconsistent": "it does not agree with the source's own numbers, or with what that cites.",
    "outdated": "it was true of an older engine, and is not of today's.",
    "not tested here": "it takes other hardware or a run that was not made, or the interval allows both answers.",
}
# How a dispute came out, but for those in which the evidence is with a source.
OUTCOMES = {
    disputes.IN_PART: "Part of what is said here holds, and part does not.",
    disputes.NONE_HOLDS: "None of it holds.",
    disputes.OPEN: "Open: not enough of it was tested here.",
}


# ---------------------------------------------------------------- the opening


def opening(claims: Sequence[Decided]) -> Html:
    """Say in two sentences what there is."""
    counts = Counter(claim.verdict.verdict for claim in claims)
    fails = sum(counts[word] for word in WORDS[1:-1])
    names = {claim.source for claim in claims}
    return Html(
        f'<p class="lead">{count(len(claims), "claim")} of {count(len(names), "published source")}, each with its '
        "conditions, its tolerance and the rule that decides it: "
        f"{counts[WORDS[0]]} hold, {fails} do not, and {counts[WORDS[-1]]} are not tested here. "
        'To look a sentence up, search <a href="#list">the list</a>; a number below sets its filter.</p>'
    )


def tally(claims: Sequence[Decided]) -> Html:
    """Count verdicts by source; each number sets the filter of the list."""
    counts = Counter((claim.source, claim.verdict.verdict) for claim in claims)
    names = list(dict.fromkeys(claim.source for claim in claims))
    totals = {word: sum(counts[name, word] for name in names) for word in WORDS}
    rows = [
        [
            _filter(name, source=name),
            *(_filter(counts[name, word], source=name, verdict=word) for word in WORDS),
            _filter(sum(counts[name, word] for word in WORDS), source=name),
        ]
        for name in names
    ]
    rows.append(["all", *(_filter(totals[word], verdict=word) for word in WORDS), Html(str(len(claims)))])
    table = markup.table("Verdicts by source", ["source", *map(_word, WORDS), "claims"], [("", rows)])
    sources = [
        Html(f"<strong>{claim.source}</strong>: {_cited(claim)}") for claim in ledger.read() if claim.source in names
    ]
    words = [Html(f"{_word(word).text} {meaning}") for word, meaning in MEANINGS.items()]
    rules = [Html(f"<strong>{name}</strong>: {meaning}") for name, meaning in RULES.items()]
    folded = [
        markup.details("The sources", markup.items(sources)),
        markup.details("What a verdict means", markup.items(words)),
        markup.details("How a claim is decided", markup.items(rules)),
    ]
    return Html("\n".join([table, *folded]))


def _cited(source: ledger.Source) -> str:
    title = escape(source.title)
    return f'<a href="{html.escape(source.url)}">{title}</a>' if source.url else title


def _filter(shown: object, **asked: str) -> Html:
    return Html(f'<a href="#{html.escape(urlencode(asked))}">{shown}</a>' if shown else "0")


# ---------------------------------------------------------------- disputes


def contradictions(claims: Sequence[Decided]) -> Html:
    """Show what sources say against one another, and against themselves, each side with its verdicts."""
    all_of_them = disputes.disputes(claims)
    between = [dispute for dispute in all_of_them if len(dispute.sources) == 2]
    decided = Counter(dispute.outcome for dispute in between if dispute.outcome in dispute.sources)
    by_source = ", ".join(f"{name} {number}" for name, number in decided.most_common())
    words = (
        f"{count(len(between), 'dispute')} between two sources, and {len(all_of_them) - len(between)} of a source with "
        "itself: claims that the ledger links because they say something else of the same subject, and that do not all "
        f"hold. In {decided.total()} between two, the evidence is with one of them"
        f"{f' ({by_source})' if by_source else ''}: what that source says holds, and what the other says of "
        "it does not. A phrase that was read in several ways, or decided by several rules, has several verdicts."
    )
    parts = [markup.paragraphs(words)]
    parts += [
        _between(sources, list(group)) for sources, group in groupby(all_of_them, lambda dispute: dispute.sources)
    ]
    return Html("\n".join(parts))


def _between(sources: tuple[str, ...], group: Sequence[disputes.Dispute]) -> str:
    source, other = sources[0], sources[-1]
    outcomes = Counter(dispute.outcome for dispute in group)
    tally = ", ".join(
        f"{number} {f'with {outcome}' if outcome in sources else outcome}" for outcome, number in outcomes.most_common()
    )
    title = f"<strong>{source}</strong> against {f'<strong>{other}</strong>' if source != other else 'itself'}"
    by_outcome = sorted(group, key=lambda dispute: [*sources, *OUTCOMES].index(dispute.outcome))
    items = "\n".join(f"<li>{_dispute(dispute)}</li>" for dispute in by_outcome)
    summary = Html(f"{title}: {count(len(group), 'dispute')} ({tally})")
    return markup.details(summary, f'<ul class="disputes">\n{items}\n</ul>')


def _dispute(dispute: disputes.Dispute) -> str:
    outcome = OUTCOMES.get(dispute.outcome, f"Of what was tested, the evidence is with {dispute.outcome}.")
    sides = "".join(
        f"<div><strong>{source}</strong>{_side([claim for claim in dispute.claims if claim.source == source])}</div>"
        for source in dispute.sources
    )
    return f'<p class="note">{outcome}</p><div class="sides">{sides}</div>'


def _side(claims: Sequence[Decided]) -> str:
    """Each phrase once, with the verdict of every claim that was made of it."""
    phrases = dict.fromkeys(claim.claim.phrase for claim in claims)
    return markup.items(
        Html(f"{escape(phrase)} {' '.join(_verdict(claim) for claim in claims if claim.claim.phrase == phrase)}")
        for phrase in phrases
    )


def _verdict(claim: Decided) -> str:
    """A verdict that leads to its claim."""
    word = claim.verdict.verdict
    return f'<a data-verdict="{word}" href="#{claim.claim.id}">{word}</a>'


def _word(word: str) -> Html:
    return Html(f'<span data-verdict="{word}">{word}</span>')


# ---------------------------------------------------------------- the list


def listed(claims: Sequence[Decided]) -> Html:
    """List every claim on a line that opens; the page's script shows the filters above it."""
    by_id = {claim.claim.id: claim for claim in claims}
    phrases = Counter(claim.claim.phrase for claim in claims)
    kinds = {kind: kind for kind in get_args(ledger.Kind)}
    fields = [
        _choice("source", {claim.source: claim.source for claim in claims}),
        _choice("verdict", {word: word for word in WORDS}),
        _choice("kind", kinds),
        _choice("rule", {name: f"{name}: {meaning}" for name, meaning in RULES.items()}, "decided by"),
        '<label class="words">words of the phrase, conditions, why or name <input type="search" name="words"></label>',
        '<button type="reset">Show all</button>',
    ]
    return Html(
        '<div id="list">\n<form id="filters" class="filters" role="search" aria-label="Filter the claims" hidden>\n'
        + "\n".join(fields)
        + f'\n</form>\n<p id="shown" class="note" role="status">{count(len(claims), "claim")}</p>\n'
        + "\n".join(_listed(claim, phrases[claim.claim.phrase] > 1, by_id) for claim in claims)
        + "\n</div>"
    )


def _choice(name: str, options: dict[str, str], label: str = "") -> str:
    shown = "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options.items())
    return f'<label>{label or name} <select name="{name}"><option value="">all</option>{shown}</select></label>'


def _listed(decided: Decided, is_repeated: bool, by_id: dict[str, Decided]) -> str:
    """One claim; where others have its phrase, its line has its name."""
    claim, verdict = decided.claim, decided.verdict
    word = verdict.verdict
    data = (
        f'data-source="{decided.source}" data-verdict="{word}" data-kind="{claim.kind}" data-rule="{claim.rule.type}"'
    )
    terms = [  # of which the script searches the first two
        ("why", escape(verdict.why)),
        ("conditions", escape(claim.conditions)),
        ("where", escape(claim.where)),
        ("expected", escape(_expected(claim))),
        ("decided by", _rule(claim.rule)),
        ("observed", escape(_observed(verdict.observed)) if verdict.observed else ""),
        ("evidence", _lines(f"<code>{escape(line)}</code>" for line in verdict.evidence)),
        ("says otherwise", _lines(_other(by_id[link]) for link in claim.links if link in by_id)),
        ("note", escape(claim.note)),
        ("name", f'<a href="#{claim.id}">{claim.id}</a>, {claim.kind}'),
    ]
    if isinstance(claim.rule, Undecidable):  # whose reason is what would decide it
        terms[0] = ("would decide it", _decider(claim.rule))
    described = "".join(f"<dt>{name}</dt><dd>{content}</dd>" for name, content in terms if content)
    name = f" <small>{claim.id.removeprefix(f'{decided.source}.')}</small>" if is_repeated else ""
    return (
        f'<details id="{claim.id}" {data}>\n<summary><span>{escape(claim.phrase)}{name}</span> '
        f"<small>{decided.source}</small> <b>{word}</b></summary>\n<dl>{described}</dl>\n</details>"
    )


def _lines(lines: Iterable[str]) -> str:
    return "<br>".join(lines)


def _other(claim: Decided) -> str:
    return f'<a href="#{claim.claim.id}">{escape(claim.claim.phrase)}</a> ({claim.source}, {claim.verdict.verdict})'


def _expected(claim: Claim) -> str:
    value, tolerance = claim.expected.value, claim.expected.tolerance
    words = f"{_value(value[0])} to {_value(value[1])}" if isinstance(value, tuple) else _value(value)
    if tolerance.relative is not None:
        words += f", within {100 * tolerance.relative:g} %"
    elif tolerance.absolute is not None:
        words += f", within {_value(tolerance.absolute)}"
    return f"{claim.expected.unit}: {words}"


def _observed(observed: Seen) -> str:
    between = (
        "" if observed.low in (None, observed.high) else f", between {_value(observed.low)} and {_value(observed.high)}"
    )
    remark = f" ({observed.told})" if between and observed.told else ""
    return f"{_value(observed.value)}{between}{remark}"


def _value(value: bool | float | str) -> str:
    """With all digits that are committed."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.6g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def _rule(rule: ledger.Arithmetic | ledger.Theory | ledger.OfRecords | Execution | Undecidable) -> str:
    match rule:
        case Arithmetic() | Undecidable():  # whose formula is in the evidence, and whose box is what would decide it
            return rule.type
        case Execution():
            return f"{rule.type} ({rule.through}){markup.code_block([rule.snippet])}"
    arguments = ", ".join(f"{name}={value!r}" for name, value in rule.arguments.items())
    return f"{rule.type}: <code>{html.escape(f'{rule.function}({arguments})', quote=False)}</code>"


def _decider(rule: Undecidable) -> str:
    command = f"<code>{escape(rule.command)}</code>" if rule.command else "this study has no command for it"
    return f"{escape(rule.box)}: {escape(rule.run)}<br>{command}"
