"""What became of what others published, as pages: an overview by question, and a page for each article."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args
from urllib.parse import urlencode

from study.claims import ledger, sentences
from study.claims.ledger import Arithmetic, Claim, Rule, Source, Undecidable
from study.claims.rules.by_execution import Execution
from study.claims.rules.by_others import ByOthers
from study.claims.sentences import RULES, THREE, Decided, Told
from study.claims.verdicts import MEANINGS, WORDS, Seen, holds
from study.report import markup
from study.report.figures.verdicts import verdicts as draw_verdicts
from study.report.markup import Html, escape
from study.report.pages.opening import lead
from study.report.words import count


def articles() -> list[Source]:
    """The sources that are sorted into sentences, each of which has a page of its own."""
    return [source for source in ledger.read() if source.sentences]


# ---------------------------------------------------------------- the overview


def opening(told: Sequence[Told]) -> Html:
    """Say what became of the articles' sentences, draw it, and lead to each article."""
    shown = [one for one in told if one.sentence is not None] or told
    came = Counter(holds(one.word) for one in shown)
    of_source = {name: Counter(holds(one.word) for one in shown if one.source == name) for name in _names(shown)}
    words = (
        f"Of {count(len(shown), 'sentence')} in which {count(len(of_source), 'published text')} say what it costs and "
        f"saves to share a training among processors, {came['yes']} hold, {came['no']} do not, and {came['open']} "
        "could not be decided here."
    )
    parts = [lead(words).text, draw_verdicts(of_source)._repr_html_()]
    for source in articles():
        three = "".join(f"<br><b>{head}</b>: {escape(getattr(source, name))}" for head, name in THREE)
        address = f'<a href="{source.source}.html">{escape(source.title)}</a>'
        parts.append(f"<p>{address}{three}</p>")
    parts += [
        markup.paragraphs(markup.led(source.source.capitalize(), source.was_read), kind="note")
        for source in ledger.read()
        if source.was_read and not source.sentences
    ]
    return Html("\n".join(parts))


def tally(told: Sequence[Told]) -> Html:
    """Count verdicts by source."""
    counts = Counter((one.source, one.word) for one in told)
    names = _names(told)
    rows = [
        [_word(word), *(_filter(counts[name, word], source=name, verdict=word) for name in names)]
        for word in WORDS
        if any(counts[name, word] for name in names)
    ]
    rows.append(["all", *(_filter(sum(one.source == name for one in told), source=name) for name in names)])
    meanings = [Html(f"{_word(word).text}: {escape(MEANINGS[word])}") for word in WORDS]
    rules = [Html(f"<strong>{name}</strong>: {meaning}") for name, meaning in RULES.items()]
    return Html(
        "\n".join(
            [
                markup.paragraphs(sentences.rested([one for one in told if one.sentence is not None] or told)),
                markup.table("Verdicts by source", ["verdict", *names], [("", rows)]),
                markup.details("What a verdict means", markup.items(meanings)),
                markup.details("How a claim is decided", markup.items(rules)),
            ]
        )
    )


def _names(told: Iterable[Told]) -> list[str]:
    """The sources, in the order of the ledger."""
    return list(dict.fromkeys(one.source for one in told))


def _filter(shown: int, **asked: str) -> Html:
    return Html(f'<a href="#{html.escape(urlencode(asked))}">{shown}</a>' if shown else "0")


def side_by_side(told: Sequence[Told]) -> Html:
    """Each question with our answer, the papers', and what each article says of it."""
    parts = []
    for key, asked in ledger.questions().items():
        said = [one for one in told if one.sentence is not None and one.sentence.question == key]
        if not said:
            continue
        lines = [
            Html(
                f'<strong>{one.source}</strong>: <a href="{one.source}.html#{one.head.claim.id}">'
                f"{escape(one.head.claim.phrase)}</a> {_word(one.word).text}"
            )
            for one in said
        ]
        came = Counter(holds(one.word) for one in said)
        summary = f"{count(len(said), 'sentence')} of the articles: {came['yes']} hold, {came['no']} do not, "
        summary += f"{came['open']} are open"
        answers = [markup.led(head, asked[name]) for head, name in (("Here", "answer"), ("The papers", "papers"))]
        parts += [f"<h3>{escape(asked['question'])}</h3>", markup.paragraphs(*answers)]
        parts.append(markup.details(summary, markup.items(lines)))
    return Html("\n".join(parts))


def corrected() -> Html:
    """List every expectation that was changed after it had been decided."""
    listed = ledger.corrections()
    groups: dict[str, list[list[object]]] = {}
    for one in listed:
        verdict = (
            one.was if one.was == one.became or one.became is None else f"{one.was} \N{RIGHTWARDS ARROW} {one.became}"
        )
        groups.setdefault(one.on, []).append([one.id, one.before, one.after, verdict, one.why])
    head = ["claim", "before", "after", "verdict, in the words of its day", "why"]
    moved = sum(one.was != one.became and one.became is not None for one in listed)
    words = (
        f"{count(len(listed), 'expectation')} were changed, added or taken out after others had been decided, and "
        f"{moved} verdicts moved with them. Up to 2026-11-21 that was done with the results in view. The "
        "ledger's history has the expectations as they stood then, and every change since is listed here."
    )
    table = markup.table("Corrections", head, list(groups.items()), words=head)
    every = markup.details("Every one, with its reason", f'<div class="prose">{table}</div>')
    return Html(markup.paragraphs(words) + every)


# ---------------------------------------------------------------- an article


def article(name: str) -> Html:
    """An article in three sentences, and the faults that matter most."""
    source = next(source for source in ledger.read() if source.source == name)
    told = sentences.read(name)
    three = [markup.led(head, getattr(source, key)) for head, key in THREE if getattr(source, key)]
    parts = [f"<h1>{escape(source.title)}</h1>", markup.paragraphs(*three, kind="lead")]
    if worst := sentences.faults(told):
        parts += ["<h2>The faults that matter most</h2>", *map(_fault, worst)]
    said = f"{sentences.rested(told)} {source.was_read or ''}"
    return Html("\n".join([*parts, "<h2>What stands behind that</h2>", markup.paragraphs(said)]))


def _fault(told: Told) -> str:
    assert told.sentence is not None
    assert told.sentence.remedy is not None
    claim = told.head.claim
    return f'<h3><a href="#{claim.id}">{escape(claim.phrase)}</a> {_word(told.word).text}</h3>\n' + markup.paragraphs(
        _said(told.sentence.reason), _instead(told.sentence.remedy)
    )


_QUOTED = re.compile(r"`([^`]+)`")
_COMMAND = re.compile(r"(zero-study|python -m [\w.]+) \w+( [\w./-]+\.\w+)?( --[\w-]+( [\w./-]*\w)?)*")


def _instead(remedy: str) -> Html:
    """What to do, its commands as such."""
    parts = _QUOTED.split(remedy)
    marked = [_COMMAND.sub(r"<code>\g<0></code>", html.escape(part, quote=False)) for part in parts]
    marked[1::2] = [f"<code>{html.escape(part, quote=False)}</code>" for part in parts[1::2]]
    return Html(f"<strong>Instead.</strong> {''.join(marked)}")


def _said(reason: str) -> Html:
    """A reason, with what it quotes of code as such."""
    return Html(_QUOTED.sub(r'<code class="command">\1</code>', html.escape(reason, quote=False)))


# ---------------------------------------------------------------- the list


def listed(told: Sequence[Told], brief: bool = False) -> Html:
    """List every sentence on a line that opens; the page's script shows the filters above it.

    `brief`: of articles that have a page, the reason and the way there.
    """
    phrases = Counter(one.head.claim.phrase for one in told)
    kinds = {kind: kind for kind in get_args(ledger.Kind)}
    names = {one.source: one.source for one in told}
    fields = [
        *([_choice("source", names)] if len(names) > 1 else []),
        _choice("verdict", {word: word for word in WORDS}),
        _choice("kind", kinds),
        _choice("rule", {name: f"{name}: {meaning}" for name, meaning in RULES.items()}, "decided by"),
        '<label class="words">words of phrase, reason, conditions or name <input type="search" name="words"></label>',
        '<button type="reset">Show all</button>',
    ]
    return Html(
        '<div id="list">\n<form id="filters" class="filters" role="search" aria-label="Filter the sentences" hidden>\n'
        + "\n".join(fields)
        + f'\n</form>\n<p id="shown" class="note" role="status">{count(len(told), "sentence")}</p>\n'
        + "\n".join(_listed(one, phrases[one.head.claim.phrase] > 1, brief) for one in told)
        + "\n</div>"
    )


def _choice(name: str, options: dict[str, str], label: str = "") -> str:
    shown = "".join(f'<option value="{html.escape(value)}">{escape(text)}</option>' for value, text in options.items())
    return f'<label>{label or name} <select name="{name}"><option value="">all</option>{shown}</select></label>'


def _listed(told: Told, is_repeated: bool, brief: bool) -> str:
    """One sentence; where others have its phrase, its line has its name. Its other readings are folded in it."""
    claim, sentence = told.head.claim, told.sentence
    data = (
        f'data-source="{told.source}" data-verdict="{html.escape(told.word)}" data-kind="{claim.kind}" '
        f'data-rule="{claim.rule.type}"'
    )
    first = (
        [("reason", _said(sentence.reason).text), ("instead", _said(sentence.remedy or "").text)] if sentence else []
    )
    line = f", line {sentence.line}" if sentence else ""
    if brief and sentence:
        way = f'<a href="{told.source}.html#{claim.id}">{told.source}, line {sentence.line}</a>'
        terms = [*first, ("conditions, evidence, readings", way)]
    else:
        terms = [*first, *_terms(told.head, line, has_reason=sentence is not None)]
    others = "".join(
        markup.details(
            Html(f"Also read: {escape(other.claim.phrase)} {_word(other.verdict.verdict).text}"),
            f'<dl id="{other.claim.id}">{_described(_terms(other, line, has_reason=False))}</dl>',
        )
        for other in ([] if brief else told.readings[1:])
    )
    name = f" <small>{claim.id.removeprefix(f'{told.source}.')}</small>" if is_repeated else ""
    return (
        f'<details id="{claim.id}" {data}>\n<summary><span>{escape(claim.phrase)}{name}</span> '
        f'<small>{told.source}</small> <b data-held="{holds(told.word)}">{told.word}</b></summary>\n'
        f"<dl>{_described(terms)}</dl>{others}\n</details>"
    )


def _described(terms: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<dt>{name}</dt><dd>{content}</dd>" for name, content in terms if content)


def _terms(decided: Decided, line: str, has_reason: bool) -> list[tuple[str, str]]:
    """What is known of a reading, of which the script searches what comes first."""
    claim, verdict = decided.claim, decided.verdict
    why = ("by the rule" if has_reason else "why", escape(verdict.why))
    if isinstance(claim.rule, Undecidable):  # whose reason is what would decide it
        why = ("would decide it", _decider(claim.rule))
    return [
        why,
        ("conditions", escape(claim.conditions)),
        ("where", escape(claim.where) + line),
        ("expected", escape(_expected(claim))),
        ("decided by", _rule(claim.rule)),
        ("observed", escape(_observed(verdict.observed)) if verdict.observed else ""),
        ("evidence", _lines(f"<code>{escape(line)}</code>" for line in verdict.evidence)),
        ("note", escape(claim.note)),
        ("name", f'<a href="#{claim.id}">{claim.id}</a>, {claim.kind}'),
    ]


def _word(word: str) -> Html:
    return Html(f'<span data-verdict="{html.escape(word)}" data-held="{holds(word)}">{escape(word)}</span>')


def _lines(lines: Iterable[str]) -> str:
    return "<br>".join(lines)


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


def _rule(rule: Rule) -> str:
    match rule:
        case Arithmetic() | Undecidable():  # whose formula is in the evidence, and whose box is what would decide it
            return rule.type
        case Execution():
            return f"{rule.type} ({rule.through}){markup.code_block([rule.snippet])}"
        case ByOthers():
            asked = rule.model_dump(exclude={"type", "quantity"}, exclude_none=True, exclude_defaults=True)
            return _called(rule.type, rule.quantity, asked)
    return _called(rule.type, rule.function, rule.arguments)


def _called(kind: str, function: str, given: Mapping[str, object]) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"{kind}: <code>{html.escape(f'{function}({arguments})', quote=False)}</code>"


def _decider(rule: Undecidable) -> str:
    command = markup.code_block([rule.command]) if rule.command else "<br>this study has no command for it"
    return f"{escape(rule.box)}: {escape(rule.run)}{command}"
