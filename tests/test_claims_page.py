"""The claims page: each claim with all that is known of it, disputes with both sides, no markup from a source."""

from __future__ import annotations

import html
import re
from collections import Counter
from typing import get_args

import pytest

from study.claims import disputes, ledger, say
from study.claims.say import Decided
from study.claims.verdicts import WORDS, Seen, Verdict
from study.report.pages import claims

GOOD, BAD, UNTESTED = "replicated", "differs", "not tested here"
ARITHMETIC = {"type": "arithmetic", "formula": "20 / 10"}


def decided(name: str, word: str = GOOD, links=(), rule=ARITHMETIC, observed=None, phrase="", **expected) -> Decided:
    claim = ledger.Claim.model_validate(
        {
            "id": name,
            "where": "a table",
            "phrase": phrase or f"the words of {name}",
            "kind": "throughput",
            "conditions": "8 GPUs",
            "expected": {"value": 2, "unit": "times", "tolerance": {"exact": True}, **expected},
            "rule": rule,
            "otherwise": BAD,
            "links": list(links),
            "note": "of two",
        }
    )
    verdict = Verdict(verdict=word, observed=observed, why="Because of < and >.", evidence=["20 / 10 = 2"])
    return Decided(name.partition(".")[0], claim, verdict)


@pytest.fixture(scope="module")
def committed() -> list[Decided]:
    return say.committed()


def text_of(piece: str) -> str:
    """What a reader reads."""
    return html.unescape(" ".join(re.sub("<[^>]*>", " ", piece).split()))


def entry(one: Decided) -> dict[str, str]:
    """What the list says of a claim, by term."""
    shown = claims.listed([one]).text
    return {term: text_of(said) for term, said in re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", shown, re.DOTALL)}


# ---------------------------------------------------------------- disputes


@pytest.mark.parametrize(
    ("one", "other", "outcome"),
    [
        (GOOD, BAD, "a"),
        ("inconsistent", GOOD, "b"),
        ("outdated", GOOD, "b"),
        (BAD, "outdated", disputes.NONE_HOLDS),
        (GOOD, UNTESTED, disputes.OPEN),
        (BAD, UNTESTED, disputes.OPEN),
        (UNTESTED, UNTESTED, disputes.OPEN),
    ],
)
def test_with_whom_the_evidence_is(one, other, outcome):
    (dispute,) = disputes.disputes([decided("a.x", one, ["b.y"]), decided("b.y", other, ["a.x"])])
    assert dispute.sources == ("a", "b")
    assert dispute.outcome == outcome


def test_evidence_may_be_with_each_in_part():
    found = [
        decided("a.good", GOOD, ["b.bad", "b.good"]),
        decided("a.bad", BAD, ["b.good"]),
        decided("b.good", GOOD, ["a.bad", "a.good"]),
        decided("b.bad", BAD, ["a.good"]),
    ]
    assert [one.outcome for one in disputes.disputes(found)] == [disputes.IN_PART]


def test_a_source_with_itself_comes_last_and_has_no_other_side():
    found = [decided("a.x", GOOD, ["a.y"]), decided("a.y", BAD, ["a.x", "b.z"]), decided("b.z", GOOD, ["a.y"])]
    between, alone = disputes.disputes(found)
    assert (between.sources, between.outcome) == (("a", "b"), "b")
    assert (alone.sources, alone.outcome) == (("a",), disputes.IN_PART)


def test_a_dispute_ends_where_the_two_sources_end():
    """b.y is disputed by a and by c, which do not dispute one another."""
    found = [decided("a.x", links=["b.y"]), decided("b.y", BAD, ["a.x", "c.z"]), decided("c.z", links=["b.y"])]
    assert [{claim.claim.id for claim in one.claims} for one in disputes.disputes(found)] == [
        {"a.x", "b.y"},
        {"b.y", "c.z"},
    ]


def test_there_is_no_dispute_where_all_holds_or_one_phrase_is_read_twice():
    assert not disputes.disputes([decided("a.x", links=["b.y"]), decided("b.y", links=["a.x"])])
    again = [decided("a.x", GOOD, ["a.y"], phrase="the same"), decided("a.y", BAD, ["a.x"], phrase="the same")]
    assert not disputes.disputes(again)


def test_every_link_is_in_one_dispute(committed):
    found = disputes.disputes(committed)
    linked = Counter(frozenset(one.claim.id for one in pair) for dispute in found for pair in dispute.pairs)
    assert set(linked.values()) == {1}
    by_id = {one.claim.id: one for one in committed}
    links = {frozenset((one.claim.id, link)) for one in committed for link in one.claim.links}
    for one, other in ([by_id[name] for name in pair] for pair in links - set(linked)):
        agree = one.verdict.verdict == other.verdict.verdict == GOOD
        assert agree or (one.source, one.claim.phrase) == (other.source, other.claim.phrase)
    assert all({claim.source for claim in one.claims} == set(one.sources) for one in found)


def test_disputes_show_each_phrase_once_with_all_its_verdicts():
    found = [
        decided("a.x.one", BAD, ["b.y"], phrase="20 against 10"),
        decided("a.x.two", UNTESTED, ["b.y"], phrase="20 against 10"),
        decided("b.y", GOOD, ["a.x.one", "a.x.two"], phrase="20 against 20"),
    ]
    shown = claims.contradictions(found).text
    assert text_of(shown).endswith(
        "a against b : 1 dispute (1 with b) Of what was tested, the evidence is with b. "
        "a 20 against 10 differs not tested here b 20 against 20 replicated"
    )
    assert re.findall('href="#(.*?)"', shown) == ["a.x.one", "a.x.two", "b.y"]


# ---------------------------------------------------------------- the tally and the list


def test_tally_counts_every_claim_and_each_number_is_a_filter(committed):
    shown = claims.tally(committed).text
    numbers = {html.unescape(asked): int(n) for asked, n in re.findall(r'<a href="#([^"]*)">(\d+)</a>', shown)}
    counts = Counter((one.source, one.verdict.verdict) for one in committed)
    sources = {one.source for one in committed}
    for (source, word), number in counts.items():
        assert numbers[f"source={source}&verdict={word.replace(' ', '+')}"] == number
    for word in WORDS:
        assert numbers[f"verdict={word.replace(' ', '+')}"] == sum(counts[name, word] for name in sources)
    assert sum(numbers[f"source={name}"] for name in sources) == len(committed)
    for source in ledger.read():
        assert f"{source.source} : {source.title}" in text_of(shown)


def test_opening_counts_what_holds():
    found = [decided(f"a.x{i}", word) for i, word in enumerate((GOOD, GOOD, *WORDS[1:-1], UNTESTED))]
    said = text_of(claims.opening(found).text)
    assert said.startswith("6 claims of 1 published source,")
    assert "2 hold, 3 do not, and 1 are not tested here." in said


def test_every_claim_is_listed_with_what_is_known(committed):
    shown = claims.listed(committed).text
    entries = re.findall(r'<details id="(.*?)" (.*?)>\n<summary>(.*?)</summary>\n<dl>(.*?)</dl>', shown, re.DOTALL)
    assert [name for name, *_ in entries] == [one.claim.id for one in committed]
    for one, (_, data, line, rest) in zip(committed, entries, strict=True):
        assert dict(re.findall('data-(.*?)="(.*?)"', data)) == {
            "source": one.source,
            "verdict": one.verdict.verdict,
            "kind": one.claim.kind,
            "rule": one.claim.rule.type,
        }
        assert text_of(line).startswith(" ".join(one.claim.phrase.split()))
        assert text_of(line).endswith(f"{one.source} {one.verdict.verdict}")
        said = text_of(rest)
        for known in (one.claim.where, one.claim.conditions, one.claim.note, *one.verdict.evidence):
            assert " ".join(known.split()) in said
        assert [link for link in re.findall('href="#(.*?)"', rest) if link != one.claim.id] == one.claim.links


def test_lines_of_one_phrase_are_told_apart(committed):
    lines = re.findall("<summary><span>(.*?)</span> <small>(.*?)</small>", claims.listed(committed).text)
    assert len(set(lines)) == len(lines) == len(committed)


def test_page_is_small_enough(committed):
    assert len((claims.listed(committed).text + claims.contradictions(committed).text).encode()) < 1e6


def test_nothing_of_a_source_is_markup():
    shown = claims.listed([decided("a.x", phrase='<script>alert("x")</script>')]).text
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert "Because of &lt; and &gt;." in shown


def test_a_number_has_its_tolerance_and_its_interval():
    seen = Seen(value=1234567.0, low=1.5, high=2e9, told="least to most")
    said = entry(decided("a.x", value=[1, 2.5], tolerance={"absolute": 0.5}, observed=seen))
    assert said["expected"] == "times: 1 to 2.5, within 0.5"
    assert said["observed"] == "1.23457e6, between 1.5 and 2e9 (least to most)"
    assert entry(decided("a.x", tolerance={"relative": 0.05}))["expected"] == "times: 2, within 5 %"
    assert "observed" not in entry(decided("a.x"))


def test_yes_and_words_are_said_as_such():
    seen = Seen(value=False, low=False, high=False, told="")
    said = entry(decided("a.x", value=True, unit="fits", observed=seen))
    assert (said["expected"], said["observed"]) == ("fits: yes", "no")
    assert entry(decided("a.x", value="accepted", unit="outcome"))["expected"] == "outcome: accepted"


def test_each_rule_says_what_it_did():
    theory = {"type": "theory", "function": "paper_volume", "arguments": {"zero_stage": 3, "accumulation": 1}}
    assert entry(decided("a.x", rule=theory))["decided by"] == "theory: paper_volume(zero_stage=3, accumulation=1)"
    execution = {"type": "execution", "snippet": 'x = "<x>"', "through": "python", "wants": {"x": "<x>"}}
    assert entry(decided("a.x", rule=execution, value="accepted"))["decided by"] == 'execution (python) x = "<x>"'
    assert entry(decided("a.x"))["decided by"] == "arithmetic"


def test_what_would_decide_it_is_said_in_full():
    rule = {"type": "undecidable", "box": "8 x H100", "run": "both arms", "command": "zero-study run paper"}
    said = entry(decided("a.x", UNTESTED, rule=rule))
    assert said["would decide it"] == "8 x H100: both arms zero-study run paper"
    assert "why" not in said
    without = entry(decided("a.x", UNTESTED, rule={**rule, "command": None}))
    assert without["would decide it"] == "8 x H100: both arms this study has no command for it"


def test_every_rule_and_every_verdict_is_explained():
    rules = (ledger.Arithmetic, ledger.Theory, ledger.OfRecords, ledger.Execution, ledger.Undecidable)
    assert tuple(say.RULES) == tuple(get_args(rule.model_fields["type"].annotation)[0] for rule in rules)
    assert tuple(claims.MEANINGS) == WORDS
