"""The pages of published claims: an overview by question, a page for each article, and the list with its filter."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args
from urllib.parse import urlencode

from study.claims import ledger, sentences
from study.claims.ledger import Arithmetic, Claim, Rule, Source, Undecidable
from study.claims.rules.by_others import ByOthers
from study.claims.sentences import RULES, THREE, Decided, Told
from study.claims.verdicts import MEANINGS, WORDS, Seen, holds
from study.report import markup
from study.report.markup import Html


def articles() -> list[Source]:
    """The sources that are sorted into sentences, each of which has a page of its own."""
    return [source for source in ledger.read() if source.sentences]


# ---------------------------------------------------------------- the overview


def opening(source: str) -> Html:
    """An article in three sentences, and its faults that matter most; without one, the three sentences of each."""
    known = {article.source: article for article in ledger.read()}
    if source:
        return _article(known[source])
    link = Html('<a href="{}.html">{}</a>')
    parts = [Html("<h1>What became of what others published?</h1>")]
    for article in articles():
        parts += [Html("<h2>{}</h2>").format(link.format(article.source, article.title)), _in_three(article)]
    parts += [markup.note(f"{one.source}: {one.was_read}") for one in known.values() if one.was_read]
    return markup.lines(*parts)


def _in_three(source: Source) -> Html:
    """What a person wrote of it: what to trust, what not, and what is not known."""
    return markup.items(markup.led(head, text) for head, key in THREE if (text := getattr(source, key)))


def _article(source: Source) -> Html:
    fault = Html('<h3><a href="#{}">{}</a> {}</h3>\n<p>{}</p>\n<p><strong>Instead.</strong> {}</p>')
    parts = [Html("<h1>{}</h1>").format(source.title), _in_three(source)]
    worst = sentences.faults(sentences.read(source.source))
    parts += [Html("<h2>The faults that matter most</h2>")] if worst else []
    for told in worst:
        assert told.sentence is not None
        claim = told.head.claim
        reason, remedy = _quoting(told.sentence.reason), _quoting(told.sentence.remedy or "")
        parts.append(fault.format(claim.id, claim.phrase, _word(told.word), reason, remedy))
    return markup.lines(*parts, markup.note(source.was_read or ""))


def tally(told: Sequence[Told]) -> Html:
    """Count verdicts by source; each number sets the filter of the list."""
    counts = Counter((one.source, one.word) for one in told)
    names = list(dict.fromkeys(one.source for one in told))
    rows: list[list[Any]] = [
        [_word(word), *(_filter(counts[name, word], source=name, verdict=word) for name in names)]
        for word in WORDS
        if any(counts[name, word] for name in names)
    ]
    rows.append(["all", *(_filter(sum(one.source == name for one in told), source=name) for name in names)])
    return markup.lines(
        markup.table("Verdicts by source", ["verdict", *names], [("", rows)]),
        markup.details("What a verdict means", markup.items(markup.led(word, MEANINGS[word]) for word in WORDS)),
        markup.details("How a claim is decided", markup.items(markup.led(*rule) for rule in RULES.items())),
    )


def _filter(shown: int, **asked: str) -> str:
    return Html('<a href="#{}">{}</a>').format(urlencode(asked), shown) if shown else "0"


def side_by_side(told: Sequence[Told]) -> Html:
    """Each question with our answer, the papers', and what each article says of it."""
    parts = []
    line = Html('<strong>{}</strong>: <a href="{}.html#{}">{}</a> {}')
    for key, asked in ledger.questions().items():
        said = [one for one in told if one.sentence is not None and one.sentence.question == key]
        if said:
            articles_say = markup.items(
                line.format(one.source, one.source, one.head.claim.id, one.head.claim.phrase, _word(one.word))
                for one in said
            )
            answers = markup.items([markup.led("Here", asked["answer"]), markup.led("The papers", asked["papers"])])
            summary = f"{len(said)} sentences of the articles"
            parts += [Html("<h3>{}</h3>").format(asked["question"]), answers, markup.details(summary, articles_say)]
    return markup.lines(*parts)


def corrected() -> Html:
    """List every expectation that was changed after it had been decided."""
    groups: dict[str, list[list[Any]]] = {}
    for one in ledger.corrections():
        verdict = f"{one.was} \N{RIGHTWARDS ARROW} {one.became}" if one.became not in (None, one.was) else one.was
        groups.setdefault(one.on, []).append([one.id, one.before, one.after, verdict, one.why])
    head = ["claim", "before", "after", "verdict, in the words of its day", "why"]
    table = Html('<div class="prose">{}</div>').format(markup.table("Corrections", head, groups.items(), words=head))
    return markup.details(f"Every one of {sum(map(len, groups.values()))}, with its reason", table)


# ---------------------------------------------------------------- the list


def listed(told: Sequence[Told], brief: bool = False) -> Html:
    """List every sentence on a line that opens; the page's script shows the filters above it.

    `brief`: of articles that have a page, the reason and the way there.
    """
    phrases = Counter(one.head.claim.phrase for one in told)
    names = list(dict.fromkeys(one.source for one in told))
    filters = [("source", "source", [(name, name) for name in names])] if len(names) > 1 else []
    filters += [
        ("verdict", "verdict", [(word, word) for word in WORDS]),
        ("kind", "kind", [(kind, kind) for kind in get_args(ledger.Kind)]),
        ("rule", "decided by", [(name, f"{name}: {meaning}") for name, meaning in RULES.items()]),
    ]
    entries = [_entry(one, phrases[one.head.claim.phrase] > 1, brief) for one in told]
    return markup.render("claims.html", filters=filters, entries=entries)


def _entry(told: Told, is_repeated: bool, brief: bool) -> dict[str, Any]:
    """One sentence; where others have its phrase, its line has its name. Its other readings are folded in it."""
    claim, sentence = told.head.claim, told.sentence
    line = f", line {sentence.line}" if sentence else ""
    terms: list[tuple[str, str]] = []
    if sentence:
        terms = [("reason", _quoting(sentence.reason)), ("instead", _quoting(sentence.remedy or ""))]
    others = []
    if brief and sentence:
        way = Html('<a href="{}.html#{}">{}{}</a>').format(told.source, claim.id, told.source, line)
        terms.append(("conditions, evidence, readings", way))
    else:
        terms += _terms(told.head, line, has_reason=sentence is not None)
        summary = Html("Also read: {} {}")
        others = [
            (
                other.claim.id,
                summary.format(other.claim.phrase, _word(other.verdict.verdict)),
                _terms(other, line, has_reason=False),
            )
            for other in told.readings[1:]
        ]
    return {
        "id": claim.id,
        "source": told.source,
        "word": told.word,
        "held": holds(told.word),
        "kind": claim.kind,
        "rule": claim.rule.type,
        "phrase": claim.phrase,
        "name": claim.id.removeprefix(f"{told.source}.") if is_repeated else "",
        "terms": terms,
        "others": others,
    }


def _terms(decided: Decided, line: str, has_reason: bool) -> list[tuple[str, str]]:
    """What is known of a reading, of which the script searches what comes first."""
    claim, verdict = decided.claim, decided.verdict
    why = ("by the rule" if has_reason else "why", verdict.why)
    if isinstance(claim.rule, Undecidable):  # whose reason is what would decide it
        command = markup.code_block(claim.rule.command) if claim.rule.command else "; this study has no command for it"
        why = ("would decide it", Html("{}: {}{}").format(claim.rule.box, claim.rule.run, command))
    code, named = Html("<code>{}</code>"), Html('<a href="#{}">{}</a>, {}')
    return [
        why,
        ("conditions", claim.conditions),
        ("where", claim.where + line),
        ("expected", _expected(claim)),
        ("decided by", _rule(claim.rule)),
        ("observed", _observed(verdict.observed) if verdict.observed else ""),
        ("evidence", Html("<br>").join(code.format(line) for line in verdict.evidence)),
        ("note", claim.note),
        ("name", named.format(claim.id, claim.id, claim.kind)),
    ]


def _word(word: str) -> Html:
    return Html('<span data-verdict="{}" data-held="{}">{}</span>').format(word, holds(word), word)


def _quoting(text: str) -> Html:
    """A text with what it quotes of code as such."""
    return Html(re.sub(r"`([^`]+)`", r'<code class="command">\1</code>', html.escape(text, quote=False)))


def _expected(claim: Claim) -> str:
    value, tolerance = claim.expected.value, claim.expected.tolerance
    words = f"{_value(value[0])} to {_value(value[1])}" if isinstance(value, tuple) else _value(value)
    if tolerance.relative is not None:
        words += f", within {100 * tolerance.relative:g} %"
    elif tolerance.absolute is not None:
        words += f", within {_value(tolerance.absolute)}"
    return f"{claim.expected.unit}: {words}"


def _observed(observed: Seen) -> str:
    if observed.low is None or observed.high is None or observed.low == observed.high:
        return _value(observed.value)
    remark = f" ({observed.told})" if observed.told else ""
    return f"{_value(observed.value)}, between {_value(observed.low)} and {_value(observed.high)}{remark}"


def _value(value: bool | float | str) -> str:
    """With all digits that are committed."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.6g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def _rule(rule: Rule) -> str:
    """What decided: the rule's type, and its function with what it was given, or its lines."""
    if isinstance(rule, Arithmetic | Undecidable):  # whose formula is in the evidence, and whose box would decide it
        return rule.type
    if rule.type == "execution":
        return Html("{} ({}){}").format(rule.type, rule.through, markup.code_block(rule.snippet))
    if isinstance(rule, ByOthers):
        asked = rule.model_dump(exclude={"type", "quantity"}, exclude_none=True, exclude_defaults=True)
        return _called(rule.type, rule.quantity, asked)
    return _called(rule.type, rule.function, rule.arguments)


def _called(kind: str, function: str, given: Mapping[str, object]) -> Html:
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return Html("{}: <code>{}</code>").format(kind, f"{function}({arguments})")
