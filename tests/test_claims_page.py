"""The claims page: each claim with all that is known of it, disputes with both sides, no markup from a source."""

from __future__ import annotations

import html
import re
from collections import Counter
from urllib.parse import urlencode

import pytest

from study.claims import ledger, sentences
from study.claims.ledger import Sentence
from study.claims.sentences import Decided, Told
from study.claims.verdicts import MEANINGS, WORDS, Verdict, holds
from study.report.pages import claims

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


def text_of(piece: str) -> str:
    """What a reader reads."""
    return html.unescape(" ".join(re.sub("<[^>]*>", " ", piece).split()))


# ---------------------------------------------------------------- the overview and the pages of articles


def test_tally_counts_every_sentence_and_each_number_is_a_filter(committed):
    shown = claims.tally(committed).text
    numbers = {html.unescape(asked): int(n) for asked, n in re.findall(r'<a href="#([^"]*)">(\d+)</a>', shown)}
    counts = Counter((one.source, one.word) for one in committed)
    for (source, word), number in counts.items():
        assert numbers[urlencode({"source": source, "verdict": word})] == number
    assert sum(numbers[f"source={name}"] for name in {one.source for one in committed}) == len(committed)
    assert tuple(MEANINGS) == WORDS


def test_every_correction_is_listed():
    said = text_of(claims.corrected().text)
    for one in ledger.corrections():
        assert one.id in said
        assert " ".join(one.why.split()) in said


# ---------------------------------------------------------------- the list


def test_every_sentence_is_listed_with_what_is_known(committed):
    shown = claims.listed(committed).text
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
    shown = claims.listed([sentence(decided("a.x", BAD), decided("a.y", "open", phrase="read otherwise"))]).text
    assert len(re.findall("<details id=", shown)) == 1
    assert '<dl id="a.y">' in shown
    assert "Also read: read otherwise open" in text_of(shown)
    assert "reason It is 1. instead Set 1. by the rule Because of < and >." in text_of(shown)
    assert "where a table, line 7" in text_of(shown)
    assert 'data-held="no"' in shown
    assert {holds(word) for word in WORDS} == {"yes", "no", "open"}


def test_nothing_of_a_source_is_markup():
    shown = claims.listed(alone(decided("a.x", phrase='<script>alert("x")</script>'))).text
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert "Because of &lt; and &gt;." in shown
