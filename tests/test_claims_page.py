"""The claims page: each claim with all that is known of it, disputes with both sides, no markup from a source."""

from __future__ import annotations

import html
import re
from collections import Counter
from urllib.parse import urlencode

import pytest
from reported import read as text_of

from study.claims import ledger, sentences
from study.claims.ledger import Sentence
from study.claims.sentences import Decided, Told
from study.claims.verdicts import MEANINGS, NEEDS, WORDS, Verdict, holds
from study.report import claims_page as claims

GOOD, BAD = "reproduced", "contradicted by runs"
ARITHMETIC = {"type": "arithmetic", "formula": "20 / 10"}


def decided(name: str, word: str = GOOD, rule=ARITHMETIC, observed=None, phrase="", **expected) -> Decided:
    claim = ledger.Claim.model_validate(
        {
            "id": name,
            "where": "a table",
            "phrase": phrase or f"the words of {name}",
            "kind": "throughput",
            "conditions": "8 GPUs",
            "expected": {"value": 2, "unit": "times", "tolerance": {"exact": True}, **expected},
            "rule": rule,
            "note": "of two",
        }
    )
    verdict = Verdict(verdict=word, observed=observed, why="Because of < and >.", evidence=["20 / 10 = 2"])
    return Decided(name.partition(".")[0], claim, verdict)


def alone(*all_of_them: Decided) -> list[Told]:
    return [Told(one.source, None, [one]) for one in all_of_them]


def sentence(*readings: Decided, **facts) -> Told:
    known = {
        "readings": [one.claim.id for one in readings], "line": 7, "question": None, "holds": "no",
        "reason": "It is 1.", "remedy": "Set 1.",
    }  # fmt: skip
    return Told(readings[0].source, Sentence.model_validate(known | facts), list(readings))


@pytest.fixture(scope="module")
def committed() -> list[Told]:
    return sentences.read()


def entry(one: Decided) -> dict[str, str]:
    """What the list says of a claim, by term."""
    shown = claims.listed(alone(one))
    return {term: text_of(said) for term, said in re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", shown, re.DOTALL)}


# ---------------------------------------------------------------- the overview and the pages of articles


def test_tally_counts_every_sentence_and_each_number_is_a_filter(committed):
    shown = claims.tally(committed)
    numbers = {html.unescape(asked): int(n) for asked, n in re.findall(r'<a href="#([^"]*)">(\d+)</a>', shown)}
    counts = Counter((one.source, one.word) for one in committed)
    for (source, word), number in counts.items():
        assert numbers[urlencode({"source": source, "verdict": word})] == number
    assert sum(numbers[f"source={name}"] for name in {one.source for one in committed}) == len(committed)
    assert tuple(MEANINGS) == WORDS


def test_an_article_has_its_faults_in_order_with_what_to_do(monkeypatch):
    worst = sentence(decided("a.x", BAD), rank=1, reason="First.", remedy="Do that.")
    other = sentence(decided("a.y", BAD), rank=2, reason="Second.")
    least = sentence(decided("a.z", BAD))
    told = [other, least, worst]
    assert sentences.faults(told) == [worst, other]
    source = ledger.Source.model_validate(
        {
            "source": "a",
            "title": "An article",
            "url": None,
            "numbers": {},
            "claims": [],
            "trust": "It.",
            "distrust": "That.",
        }
    )
    monkeypatch.setattr(ledger, "read", lambda: [source])
    monkeypatch.setattr(sentences, "read", lambda name: told)
    said = text_of(claims.opening("a"))
    assert said.startswith("An article Trust. It. Do not trust. That.")
    assert said.index("the words of a.x") < said.index("the words of a.y")
    assert said.index("Do that.") < said.index("Second.")


# ---------------------------------------------------------------- the list


def test_every_sentence_is_listed_with_what_is_known(committed):
    shown = claims.listed(committed)
    entries = re.findall(r'<details id="(.*?)" (data.*?)>\n<summary>(.*?)</summary>', shown, re.DOTALL)
    assert [name for name, *_ in entries] == [one.head.claim.id for one in committed]
    said = text_of(shown)
    for one, (_, data, line) in zip(committed, entries, strict=True):
        assert {name: html.unescape(value) for name, value in re.findall('data-(.*?)="(.*?)"', data)} == {
            "source": one.source,
            "verdict": one.word,
            "kind": one.head.claim.kind,
            "rule": one.head.claim.rule.type,
        }
        assert text_of(line).startswith(" ".join(one.head.claim.phrase.split()))
        assert text_of(line).endswith(f"{one.source} {one.word}")
        for reading in one.readings:
            for known in (reading.claim.conditions, reading.claim.note, *reading.verdict.evidence):
                assert " ".join(known.split()) in said


def test_other_readings_are_folded_under_the_headline():
    shown = claims.listed([sentence(decided("a.x", BAD), decided("a.y", "open", phrase="read otherwise"))])
    assert len(re.findall("<details id=", shown)) == 1
    assert '<dl id="a.y">' in shown
    assert "Also read: read otherwise open" in text_of(shown)
    assert "reason It is 1. instead Set 1. by the rule Because of < and >." in text_of(shown)
    assert "where a table, line 7" in text_of(shown)
    assert 'data-held="no"' in shown
    assert {holds(word) for word in WORDS} == {"yes", "no", "open"}


def test_nothing_of_a_source_is_markup():
    shown = claims.listed(alone(decided("a.x", phrase='<script>alert("x")</script>')))
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert "Because of &lt; and &gt;." in shown


def test_what_would_decide_it_is_said_in_full():
    rule = {"type": "undecidable", "box": "8 x H100", "run": "both arms", "command": "zero-study run paper"}
    said = entry(decided("a.x", NEEDS, rule=rule))
    assert said["would decide it"] == "8 x H100: both arms zero-study run paper"
    assert "why" not in said
    without = entry(decided("a.x", NEEDS, rule={**rule, "command": None}))
    assert without["would decide it"] == "8 x H100: both arms; this study has no command for it"
