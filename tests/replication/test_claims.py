"""The claims ledger: what is refused, what formulas may hold, how verdicts come about, and that the committed hold."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from refusing import refusal

from study.claims import corrections_page, in_terminal, ledger, sentences, verdicts
from study.claims.ledger import Claim, OfRecords
from study.claims.rules import (
    MissingEvidence,
    Observed,
    by_arithmetic,
    by_others,
    by_public_runs,
    by_records,
    by_theory,
)
from study.public_runs import archive
from study.records import find as records
from study.running import studies
from zero_study import cli
from zero_study.errors import Refusal
from zero_study.theory import intervals, measured_by_others

CLAIM = {
    "id": "small.speed.ratio",
    "where": "a table",
    "phrase": "20 against 10",
    "kind": "throughput",
    "conditions": "not stated",
    "expected": {"value": 2, "unit": "a ratio of {times}", "tolerance": {"relative": 0.05}},
    "rule": {"type": "arithmetic", "formula": "fast / slow"},
    "note": "",
}
SOURCE = {"source": "small", "title": "Small", "url": None, "numbers": {"fast": 20, "slow": 10}, "claims": [CLAIM]}
FITS = {
    "model": "gpt2-xl", "strategy": "zero2", "gpu": "a100-80gb", "gpus": 8, "micro_batch": 1, "sequence_length": 1024,
    "precision": "bf16", "checkpointing": True,
}  # fmt: skip


def write(folder: Path, change=lambda claim, source: None) -> Path:
    """Write a ledger of one source with one claim; `change` alters both."""
    source = copy.deepcopy(SOURCE)
    change(source["claims"][0], source)
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(source))
    return path


@pytest.fixture(scope="module")
def sources():
    return ledger.read()


@pytest.fixture(scope="module")
def now():
    return verdicts.decide_all()


# ---------------------------------------------------------------- what is refused


def rule(**content):
    return lambda claim, source: claim.update(rule=content)


def expected(**content):
    return lambda claim, source: claim["expected"].update(content)


REFUSED = [
    (lambda c, s: c["expected"].pop("unit"), "expected.unit"),
    (lambda c, s: c["expected"].pop("tolerance"), "expected.tolerance"),
    (expected(tolerance={"relative": 0.1, "exact": True}), "relative and exact"),
    (expected(value=[1, 2, 3]), "value [1, 2, 3]"),
    (expected(value=[2, 1]), "the lower end comes first"),
    (expected(value="accepted"), "'accepted' has none but exact"),
    (rule(type="guess"), "'guess'"),
    (rule(type="theory", function="fit", arguments={}), "function 'fit'"),
    (rule(type="record", function="volume", arguments={"strategy": "ddp", "seeds": 3}), "arguments: "),
    (rule(type="theory", function="fits", arguments={k: v for k, v in FITS.items() if k != "gpu"}), "gpu is missing"),
    (rule(type="theory", function="speed_ratio", arguments={"of": FITS, "to": {**FITS, "gpus": "8"}}), "to: gpus='8'"),
    (rule(type="theory", function="peak", arguments={**FITS, "seeds": 3}), "'seeds'"),
    (rule(type="theory", function="fits", arguments={**FITS, "model": {"name": "gpt-10b"}}), "model: architecture"),
    (rule(type="theory", function="memory_ratio", arguments={"of": FITS, "to": 2}), "arguments.to: 2 is not a case"),
    (lambda c, s: c.update(kind="speed"), "kind='speed'"),
    (lambda c, s: c.update(extra=1), "extra"),
    (lambda c, s: c.update(phrase="word " * 13), "13 words, of which 12"),
    (lambda c, s: c.update(id="large.speed.ratio"), "must begin with small."),
    (rule(type="arithmetic", formula="fast / slower"), "slower is not among the source's"),
]


def test_a_wrong_entry_is_refused_by_file_claim_and_key(tmp_path):
    for change, fact in REFUSED:
        path = write(tmp_path, change)
        said = refusal(ledger.read, tmp_path)
        name = yaml.safe_load(path.read_text())["claims"][0]["id"]
        assert said.startswith(f"{path}: {name}: ")
        assert fact in said


# ---------------------------------------------------------------- formulas


def test_a_formula_is_evaluated():
    for formula, value in {"a * 2 + b / 4 - 1": 6, "-(a - b) ** 2": -1, "max(a, b) + min(a, 1)": 5, "1e3": 1e3}.items():
        assert by_arithmetic.observe(formula, {"a": 3, "b": 4}).value == pytest.approx(value)


def test_a_formula_holds_nothing_else():
    for formula in (
        "__import__('os').system('true')", "open('x')", "abs(a)", "a.real", "a[0]", "[a]", "a if a else 1", "a and 1",
        "a < 1", "(lambda: 1)()", "min(*[1, 2])", "max(a, key=a)", "a // 2", "True", "'a'", "max(a)", "round(a)",
        "a / (a - 3)", "9 ** 9 ** 9", "1e300 * 1e300", "(1e300) ** 2", "(0 - a) ** 0.5", "a +", "a = 1",
        "unknown",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^formula"):
            by_arithmetic.observe(formula, {"a": 3})


# ---------------------------------------------------------------- from what was observed to a verdict


def claim(value, unit, **tolerance) -> Claim:
    said = {"value": value, "unit": unit, "tolerance": tolerance or {"exact": True}}
    rule = {"type": "theory", "function": "num_params", "arguments": {"model": "gpt2-xl"}}
    return Claim.model_validate({**CLAIM, "expected": said, "rule": rule})


def judged(monkeypatch, result: Observed, of: Claim) -> verdicts.Verdict:
    monkeypatch.setitem(by_theory.FUNCTIONS, "num_params", lambda model: result)
    return verdicts.decide(ledger.Source.model_validate({**SOURCE, "claims": []}), of)


@pytest.mark.parametrize(
    ("value", "tolerance", "observed", "interval", "verdict"),
    [
        (2, {"relative": 0.1}, 2.19, None, "agrees, not run"),
        (2, {"relative": 0.1}, 2.21, None, "contradicted"),
        (-2, {"relative": 0.1}, -2.19, None, "agrees, not run"),
        (0, {"absolute": 0.01}, -0.009, None, "agrees, not run"),
        (0.3, {"exact": True}, 0.1 + 0.2, None, "agrees, not run"),  # but for rounding
        (0.3, {"exact": True}, 0.3001, None, "contradicted"),
        ([1, 2], {"exact": True}, 2, None, "agrees, not run"),
        ([1, 2], {"exact": True}, 1.5, (1.2, 1.8), "agrees, not run"),
        ([1, 2], {"exact": True}, 1.5, (0.9, 1.8), "open"),
        ([1, 2], {"exact": True}, 0.9, (0.7, 1.1), "open"),
        ([1, 2], {"exact": True}, 0.8, (0.7, 0.9), "contradicted"),
        (2, {"relative": 0.05}, 2, (1.7, 2.3), "open"),  # near enough, and not known well enough
        (64, {"relative": 0.25, "side": "below"}, 50, None, "agrees, not run"),  # a stated need may be generous
        (64, {"relative": 0.25, "side": "below"}, 47, None, "contradicted"),
        (64, {"relative": 0.25, "side": "below"}, 64.5, None, "contradicted"),  # but it has to suffice
        (64, {"relative": 0.25, "side": "below"}, 62, (58, 66), "open"),
        (True, {}, True, None, "agrees, not run"),
        (True, {}, False, (False, False), "contradicted"),
        (True, {}, True, (False, True), "open"),
    ],
)
def test_an_interval_decides_only_where_all_of_it_does(monkeypatch, value, tolerance, observed, interval, verdict):
    unit = "Does it fit?" if isinstance(value, bool) else "a ratio of {times}"
    result = judged(monkeypatch, Observed(observed, ("e",), interval), claim(value, unit=unit, **tolerance))
    assert result.verdict == verdict
    assert result.evidence == ["e"]
    assert ("too close" in result.why) == (verdict == "open")


@pytest.mark.parametrize(
    ("value", "tolerance", "observed", "shown"),
    [
        ([0, 76], {}, 144.548, ("145", "We count at most 76 as agreement: contradicted")),
        ([0.95, 100], {}, 1.23456, ("1.23", "We count at least 0.95 as agreement: agrees")),
        ([1, 8], {}, 8.5, ("8.5", "We count 1 to 8 as agreement: contradicted")),
        (76, {"absolute": 0.5}, 144.548, ("145", "The source says about 76: contradicted")),
        (64, {"relative": 0.25, "side": "below"}, 68.9, ("68.9", "We count 48 to 64 as agreement: contradicted")),
        (
            [1.0005, 100],
            {},
            1.0001,
            ("1.0001", "We count at least 1.0005 as agreement: contradicted"),
        ),  # three digits would show 1 and 1
        (37, {}, 37, ("37", "The source says 37: agrees")),
        (
            [-1, -0.005],
            {},
            -0.131,
            ("-0.131", "We count at most -0.005 as agreement: agrees"),
        ),  # nothing can fall by more than all of it
        ([1536, 1e6], {}, 1600.5, ("1600", "We count at least 1536 as agreement: agrees")),  # integers are exact
        ([2e12, 1e15], {}, 2.0964e12, ("2.1 trillion", "We count at least 2 trillion as agreement: agrees")),
        (7e9, {"relative": 0.05}, 3.7649e9, ("3.76 billion", "The source says about 7 billion: contradicted")),
    ],
)
def test_a_reason_has_the_observed_value_and_the_bound_that_decides(monkeypatch, value, tolerance, observed, shown):
    why = judged(monkeypatch, Observed(observed, ("e",)), claim(value, unit="a peak of {GB}", **tolerance)).why
    assert why == f"We predict a peak of {shown[0]} GB. {shown[1]}."


@pytest.mark.parametrize(
    ("value", "unit", "observed", "interval", "begins"),
    [
        (76, "a peak of {GB} under ZeRO-0", 145, (131, 159), "We predict a peak of 145 GB (131 to 159) under ZeRO-0."),
        (2, "{GPUs} in use", 1, None, "We predict 1 GPU in use."),
        (2, "{times as many bytes} as before", 1, None, "We predict 1 times as many bytes as before."),
        (2, "{} as the stage", 3, None, "We predict 3 as the stage."),
        (
            True,
            "Does it fit?",
            False,
            (False, False),
            "Does it fit? We predict: no. The source says yes: contradicted.",
        ),
    ],
)
def test_a_reason_is_a_sentence_with_the_value_in_its_place(monkeypatch, value, unit, observed, interval, begins):
    assert judged(monkeypatch, Observed(observed, ("e",), interval), claim(value, unit)).why.startswith(begins)


def test_an_interval_that_seems_to_touch_the_bound_that_contradicts_it_has_more_digits(monkeypatch):
    observed = Observed(1.10213, ("e",), (1.00452, 1.21987))
    why = judged(monkeypatch, observed, claim([0, 1], "a ratio of {}")).why
    assert why == "We predict a ratio of 1.10213 (1.00452 to 1.21987). We count at most 1 as agreement: contradicted."


@pytest.mark.parametrize(
    ("value", "unit"),
    [(2, "times"), (2, "{} of {GB}"), (True, "it fits"), ("float32", "the type"), ("accepted", "{} of a setting")],
)
def test_a_unit_without_its_place_is_refused(value, unit):
    with pytest.raises(ValueError, match="unit"):
        claim(value, unit)


def test_no_committed_reason_has_an_artificial_bound_or_a_place_without_its_value():
    reasons = {name: verdict.why for name, verdict in verdicts.read().items() if verdict.observed}
    assert len(reasons) > 600
    for name, why in reasons.items():
        begins = r" (The source says|We count) "
        assert re.search(begins + r".+: (agrees|contradicted|too close|not decided)", why), name
        *_, said = re.split(begins, why)
        assert not re.search(r"e\+?15|^-1 to| to 1,?000,?000|quadrillion", said), name
        assert verdicts.PLACE.search(re.split(begins, why)[0].split("tried")[0]) is None, name


def test_an_interval_is_said_to_end_at_the_memory_of_the_gpu_only_if_it_does():
    case = {"model": "gemma2-9b", "gpu": "h100-sxm", "gpus": 8, "sequence_length": 2048, "precision": "bf16-autocast"}
    for strategy, fits in (("zero0", False), ("zero3", True)):
        observed = by_theory.peak_of_any_batch(strategy=strategy, **case)
        assert (observed.interval[1] == 80 * 2**30) == fits == ("memory of the GPU" in observed.told)


# ---------------------------------------------------------------- functions


def test_a_case_with_an_adapter_has_only_the_states_of_the_adapter():
    case = {**FITS, "strategy": "single", "gpus": 1, "precision": "bf16", "checkpointing": True}
    whole = by_theory.peak(**case)
    adapted = by_theory.peak(**case, lora_rank=8, lora_target="all-linear")
    quantized = by_theory.peak(**case, lora_rank=8, lora_target="all-linear", load_in_4bit=True)
    assert whole.number > 3 * adapted.number > 3 * quantized.number
    assert "LoRA of rank 8" in adapted.evidence[0]


def test_frozen_weights_are_sharded_in_the_records_of_the_study_lora():
    arguments = {"study": "lora", "part": "parameters", "to": "zero2_tuned"}
    assert by_records.held_ratio(of="zero3_tuned", label="lora", **arguments).number == pytest.approx(0.5, abs=0.01)
    assert by_records.held_ratio(of="ddp", label="lora", **arguments).number == pytest.approx(1, abs=0.01)
    with pytest.raises(ValueError, match="no model of lora"):
        by_records.held_ratio(of="zero3_tuned", label="no_such_label", **arguments)


def test_what_the_papers_count():
    figure_1 = [by_theory.paper_total_bytes(7.5e9, stage, 64, "fp16").value / 1e9 for stage in range(4)]
    assert figure_1 == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
    assert by_theory.paper_saving_share(1, 3, 4, "bf16").value == pytest.approx(9 / 12)
    assert by_theory.paper_offload_reduction(1, "fp16").value == 8
    ratio = by_theory.paper_volume_ratio({"zero_stage": 3, "accumulation": 1}, {"zero_stage": 0, "accumulation": 1})
    assert ratio.value == 1.5
    assert by_theory.paper_peak_reduction(3, 8, "bf16").interval == (1, 8)


def test_a_ratio_to_itself_is_one_and_as_uncertain_as_what_it_rests_on():
    same = by_theory.speed_ratio(FITS, FITS)
    spread = intervals.EVIDENCE["one node"].spread
    assert (same.value, same.interval) == (1, pytest.approx((1 / spread, spread)))
    for other in ({"strategy": "zero2_cpu_offload"}, {"gpus": 16}, {"precision": "fp32"}, {"model": "mpt-1b"}):
        result = by_theory.speed_ratio({**FITS, **other}, FITS)
        sides = [
            by_theory.prediction_of(by_theory.Case.of(case)).step.evidence.spread for case in ({**FITS, **other}, FITS)
        ]
        both = np.exp(np.hypot(*np.log(sides)))  # nothing is taken to cancel
        assert max(sides) < both
        assert result.interval[1] / result.value == pytest.approx(both)


# ---------------------------------------------------------------- the committed ledger


def test_what_would_decide_the_rest_can_be_run(sources):
    """The commands are the study's: no misspelt study, and no flag that nobody knows."""
    rules = [one.rule for source in sources for one in source.claims]
    for command in {rule.command for rule in rules if isinstance(rule, ledger.Undecidable)} - {None}:
        program, *words = shlex.split(command)
        assert program == "zero-study"
        context = cli.parse(words)
        if context.command.name == "run":
            studies.find(context.params["study"])


@pytest.mark.pages
def test_the_committed_verdicts_follow(now):
    assert verdicts.outdated(verdicts.read(), now) == {}
    known = {name: one.verdict for name, one in now.items()} | {one.head.claim.id: one.word for one in sentences.read()}
    latest = {one.id: one.became for one in ledger.corrections() if one.on >= "2026-11-25"}
    words = {conclusion.word for conclusion in verdicts.Conclusion}
    last = {name: became for name, became in latest.items() if became in words}  # others were taken out
    assert len(last) > 90
    assert last.items() <= known.items()


def test_a_wide_tolerance_has_a_reason_of_its_own(sources):
    """More than 5 %, or more than 2 % between what the source states and what agrees with it."""
    committed = verdicts.read()
    for claim in (claim for source in sources for claim in source.claims if claim.expected.tolerance.relative):
        observed, value = committed[claim.id].observed, claim.expected.value
        off = 0.0
        if observed and isinstance(value, float) and isinstance(observed.value, float) and value:
            off = abs(observed.value / value - 1)
        agrees = verdicts.Conclusion.of(committed[claim.id].verdict).standing == "yes"
        is_wide = claim.expected.tolerance.relative > 0.05 or (agrees and off > 0.02)
        assert claim.note or not is_wide, claim.id


def test_no_stated_need_of_memory_is_right_that_we_predict_to_be_too_small(sources):
    """The row of LoRA for 30B was once right: 64 GB, of which the frozen weights alone take 65.5."""
    committed = verdicts.read()
    needs = [claim for source in sources for claim in source.claims if claim.expected.tolerance.side]
    assert len(needs) > 10
    for claim in needs:
        verdict = committed[claim.id]
        if verdict.observed and verdicts.Conclusion.of(verdict.verdict).standing == "yes":
            assert max(verdict.observed.value, verdict.observed.high or 0) <= claim.expected.value, claim.id
    wide = [claim for source in sources for claim in source.claims if (claim.expected.tolerance.relative or 0) > 0.1]
    assert not [
        one.id for one in wide if getattr(one.rule, "function", "") == "peak" and not one.expected.tolerance.side
    ]
    assert committed["llama-factory.lora.30b.weights"].verdict == "contradicted"


def test_a_sentence_of_which_a_part_was_tested_says_so():
    judged = sentences.read()
    partly = [each for each in judged if each.undecided]
    assert partly
    for each in partly:
        assert each.conclusion.standing == "yes"
        assert each.undecided[0].verdict.why in each.why
    whole = [each for each in judged if each.conclusion.standing != "yes" or len(each.readings) == 1]
    assert not any(each.undecided for each in whole)
    content = sentences.content(judged)["sentences"]
    assert sum(bool(each["undecided"]) for each in content) == len(partly)


@pytest.mark.pages
def test_a_verdict_that_no_longer_follows_is_found(now):
    name = next(name for name, one in now.items() if one.observed and one.observed.low is not None)
    one = now[name]
    changes = {
        "verdict": one.model_copy(update={"verdict": "needs hardware"}),
        "numbers": one.model_copy(update={"observed": one.observed.model_copy(update={"low": -1.0})}),
        "evidence": one.model_copy(update={"evidence": ["another run"]}),
        "reason": one.model_copy(update={"why": "Because."}),
    }
    for part, changed in changes.items():
        assert verdicts.outdated({**now, name: changed}, now)[name].endswith(f" {part}")
    assert set(verdicts.outdated({key: one for key, one in now.items() if key != name}, now)) == {name}
    assert set(verdicts.outdated({**now, "gone.claim": one}, now)) == {"gone.claim"}
    assert verdicts.outdated(now, now) == {}


# ---------------------------------------------------------------- the command


@pytest.mark.pages
def test_check_fails_and_lists_what_changed(monkeypatch, capsys, sources, now):
    monkeypatch.setattr(ledger, "read", lambda: sources)
    monkeypatch.setattr(verdicts, "decide_all", lambda **_: now)
    assert cli.run(["claims", "--check"]) == 0
    assert f"{len(now)} committed verdicts follow" in capsys.readouterr().out
    name, one = next(iter(now.items()))
    monkeypatch.setattr(verdicts, "read", lambda: {**now, name: one.model_copy(update={"why": "Because."})})
    assert cli.run(["claims", "--check"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"1 of {len(now)} claims differ")
    assert out[1].startswith(f"  {name}: ")


@pytest.mark.pages
def test_absent_records_are_no_sound_check(monkeypatch, capsys, sources, now):
    """Claims that could not be decided are listed, and --write loses none of their verdicts."""
    names = [name for name, one in now.items() if one.by == "record"]
    assert names

    def decide(missing):
        missing.update(dict.fromkeys(names, "reports/cpu/records/learned: there are no records in this folder"))
        return {name: one for name, one in now.items() if name not in names}

    monkeypatch.setattr(ledger, "read", lambda: sources)
    monkeypatch.setattr(verdicts, "decide_all", decide)
    monkeypatch.setattr(verdicts, "write", lambda *_: pytest.fail("written"))
    assert cli.run(["claims", "--check"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "committed verdicts follow" not in out
    assert f"{len(names)} claims could not be decided: reports/cpu/records/learned: there are no records" in out
    assert "would be lost" in refusal(cli.run, ["claims", "--write"])


def test_a_claim_whose_records_are_absent_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(by_records, "RECORDS", tmp_path)
    with pytest.raises(MissingEvidence):
        by_records._folder("learned")

    def is_of_folder(claim: Claim) -> bool:
        return isinstance(claim.rule, OfRecords) and claim.rule.function == "state_bytes_per_parameter"

    source = next(source for source in ledger.read() if any(is_of_folder(c) for c in source.claims))
    claim = next(claim for claim in source.claims if is_of_folder(claim))
    missing = {}
    monkeypatch.setattr(ledger, "read", lambda _: [source.model_copy(update={"claims": [claim]})])
    by_records._finished.cache_clear()
    try:
        assert verdicts.decide_all(missing=missing) == {}
    finally:
        by_records._finished.cache_clear()
    assert list(missing) == [claim.id]


@pytest.mark.parametrize(
    "words", ['{"a": foo}', "\x1b[31m x\ny", "(" * 2000, "`" * 3000, "a**" * 2000, "[x](" * 900, ""]
)
def test_a_search_takes_any_text(words, capsys):
    assert cli.run(["claims", "--search", words]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_the_command_refuses_what_makes_no_sense():
    for name, said in (("nature", "The sources are a100-replication, "), ("hf-analysi", "Do you mean hf-analysis")):
        assert f"{name}: there is no source and no claim of this name. {said}" in refusal(cli.run, ["claims", name])
    for words in (["--check", "--write"], ["--check", "--search", "x"], ["--write", "papers"], ["--search", "x", "p"]):
        assert "Give only one of these options" in refusal(cli.run, ["claims", *words])


# ---------------------------------------------------------------- sentences

TOLD = {"readings": ["small.speed.ratio"], "line": 3, "holds": "yes", "reason": "So it is."}
THREE = {"was_read": "as text", "trust": "a", "distrust": "b", "unknown": "c"}


def sorted_out(**changes):
    def change(claim, source):
        source.update(THREE | {"sentences": [TOLD | changes]})

    return change


def test_a_sentence_is_held_against_what_its_readings_come_to(tmp_path):
    write(tmp_path, sorted_out())
    decided = verdicts.decide_all(tmp_path)
    assert verdicts.disagreeing(ledger.read(tmp_path), decided) == {}
    write(tmp_path, sorted_out(holds="no", remedy="Do not."))
    said = verdicts.disagreeing(ledger.read(tmp_path), decided)["small.speed.ratio"]
    assert said == "the ledger states 'no' (holds), but the verdict is agrees, not run"


def test_a_headline_hears_every_reading():
    yes, itself, run = ("agrees, not run", "theory"), ("contradicts itself", "arithmetic"), ("contradicted", "record")
    maybe, none = ("open", "theory"), ("needs hardware", None)
    for heads, said in (
        ((yes, maybe), yes), ((none, yes), none), ((maybe, run), run), ((none, itself), itself), ((itself, run), run),
        ((yes, itself, run), ("in part", "record")),
    ):  # fmt: skip
        readings = [verdicts.Verdict(verdict=word, by=by, observed=None, why="w", evidence=[]) for word, by in heads]
        assert verdicts.headline(readings) == said


def test_a_page_has_an_answer_on_top_and_a_quote_in_one_row(sources, monkeypatch):
    monkeypatch.setattr(ledger, "read", lambda: sources)
    assert len(verdicts.Conclusion) == 8
    for told in (sentences.read(one.source) for one in sources if one.believe):
        assert len({one.head.claim.phrase for one in told}) == len(told)
        assert all(one.sentence.says for one in told)


@pytest.mark.parametrize("source", ["zero3-blog", "llama-factory", "papers"])
def test_a_source_begins_with_its_title_and_three_sentences(source, monkeypatch):
    """Ranked faults come first. A source with fewer of them, or without sentences, has three all the same."""
    monkeypatch.setenv("COLUMNS", "60")
    judged = sentences.read(source)
    first = sentences.most_important(judged)
    faults = sentences.faults(judged)
    assert first[: len(faults)] == faults[:3]
    assert len({each.says for each in first}) == 3
    lines = in_terminal.text(source).splitlines()
    assert max(map(len, lines)) <= 60
    title = next(one.title for one in ledger.read() if one.source == source)
    top = " ".join(" ".join(lines).split())
    assert top.startswith(title)
    places = [top.index(each.says.rstrip(".")) for each in first]
    assert places == sorted(places)


def test_the_page_for_authors_has_every_ranked_fault():
    page = corrections_page.text()
    for judged in sentences.read():
        if judged.sentence and judged.sentence.rank:
            assert f"(line {judged.sentence.line})" in page
            assert corrections_page._inline(judged.sentence.reason) in page
    assert len(page.split()) < 6000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"holds": "no"}, "remedy: "),
        ({"remedy": "Do not."}, "remedy: "),
        ({"rank": 1}, "rank: is of sentences that do not hold"),
        ({"holds": "no", "remedy": "x", "rank": 2}, "the ranks are [2]; number the faults that matter from 1 on"),
        ({"readings": ["small.other"]}, "small.other is no claim of this source"),
        ({"readings": ["small.speed.ratio"] * 2}, "small.speed.ratio is in 2 of them"),
        ({"question": "why"}, "there is no question 'why'. Choose one of held, stage2-sends"),
    ],
)
def test_a_wrong_sentence_is_refused(tmp_path, changes, said):
    write(tmp_path, sorted_out(**changes))
    assert said in refusal(ledger.read, tmp_path)


def test_a_source_with_sentences_has_all_claims_in_them(tmp_path):
    def more(claim, source):
        sorted_out()(claim, source)
        source["claims"].append({**copy.deepcopy(claim), "id": "small.other"})

    write(tmp_path, more)
    assert "sentences: small.other is in none of them" in refusal(ledger.read, tmp_path)
    write(tmp_path, lambda claim, source: source.update({"sentences": [TOLD]}))
    assert "was_read: is missing" in refusal(ledger.read, tmp_path)


# ---------------------------------------------------------------- what others measured

PUBLISHED_ROWS = measured_by_others.cases()
BY_OTHERS = {
    "type": "others", "quantity": "speed", "asks": "every", "grade": "A",
    "of": {"engine": "ZeRO-3"}, "to": {"engine": "ZeRO-2"}, "differs": ["engine"],
}  # fmt: skip


def measured(engine: str, speed: float, grade: str = "A", family: str = "them", micro_batch: int = 2, **changes):
    """One row that others might have published; `engine` is zero2 or zero3."""
    real = next(case for case in PUBLISHED_ROWS if case.family == "LLaMA on A800" and case.grade == "B")
    job = dataclasses.replace(real.job, micro_batch_size=micro_batch, gradient_accumulation_steps=1)
    quantity = "tokens_per_second_per_gpu"
    stage = dataclasses.replace(real.engine, zero_stage=int(engine[-1]))
    row = dataclasses.replace(real, name=f"{engine} x {micro_batch}", family=family, grade=grade, quantity=quantity)
    return dataclasses.replace(row, published=speed, engine=stage, job=job, **changes)


@pytest.fixture
def rows_of(monkeypatch, tmp_path):
    """Decide the small claim, ZeRO-3 at least as fast as ZeRO-2, by rows of others."""

    def decide(*rows, value=(1, 10), **changes):
        monkeypatch.setattr(measured_by_others, "cases", lambda kind="times": list(rows))
        content = {**BY_OTHERS, **changes}

        def change(claim, source):
            claim["rule"] = content
            claim["expected"] = {"value": list(value), "unit": "a speed of {times}", "tolerance": {"exact": True}}

        write(tmp_path, change)
        return verdicts.decide_all(tmp_path)["small.speed.ratio"]

    return decide


def test_rows_of_others_decide_on_these_rows_alone(rows_of):
    result = rows_of(measured("zero3", 1200), measured("zero2", 1000))
    assert (result.verdict, result.by) == ("agrees, not run", "others")
    assert result.observed.value == pytest.approx(1.2)
    assert "We count 1 to 10 as agreement: agrees in these measurements" in result.why
    assert "them (grade A: llama-2-7b in bf16, 8 x a100-80gb" in result.why  # its scope
    assert result.evidence[-1].startswith("them: https://")  # where they stand, and what was assumed


def test_a_verdict_flips_where_the_rows_say_otherwise(rows_of):
    slow, fast = measured("zero3", 800), measured("zero2", 1000)
    assert rows_of(slow, fast).verdict == "contradicted"
    assert rows_of(slow, fast, value=(0, 1)).verdict == "agrees, not run"
    assert rows_of(measured("zero3", 1020), fast).verdict == "open"  # a run's repeat may differ by as much


def test_what_holds_always_fails_by_one_pair(rows_of):
    rows = [measured("zero3", 1200), measured("zero2", 1000)]
    against = [measured("zero3", 700, family="others"), measured("zero2", 1000, family="others")]
    result = rows_of(*rows, *against)
    assert result.verdict == "contradicted"
    assert "agrees least, out of 2 (0.7 to 1.2)" in result.why
    assert rows_of(*rows, *against, value=(0, 1)).verdict == "contradicted"  # by the other pair


@pytest.mark.parametrize("other", [{"family": "others"}, {"grade": "B"}, {"micro_batch": 4}, {"engine": "zero1"}])
def test_rows_that_differ_in_more_than_is_asked_are_no_pair(rows_of, other):
    with pytest.raises(Refusal, match="no two rows of grade A differ only in engine"):
        rows_of(measured("zero3", 1200), measured(**{"engine": "zero2", "speed": 1000, **other}))


def test_whether_it_fits_is_what_a_row_says(monkeypatch):
    requested = {"type": "others", "quantity": "fits", "asks": "every", "grade": "B"}
    rule = by_others.ByOthers.model_validate({**requested, "of": {"model": "gpt2-xl", "engine": "DDP"}})
    real = next(case for case in measured_by_others.cases("memory") if case.quantity == "fits" and case.grade == "B")
    rows = [dataclasses.replace(real, published=False), dataclasses.replace(real, published=True)]
    for listed, expected in ((rows[:1], (False, False)), (rows[1:], (True, True)), (rows, (False, True))):
        monkeypatch.setattr(measured_by_others, "cases", lambda kind="times", listed=listed: listed)
        assert by_others.observe(rule, None).interval == expected
    monkeypatch.setattr(measured_by_others, "cases", lambda kind="times": [])
    with pytest.raises(ValueError, match="no row of grade AB"):
        by_others.observe(rule, None)


def test_a_run_is_taken_as_far_off_as_rows_that_were_measured_twice():
    rows = [case for case in measured_by_others.cases() if case.grade != "C" and not case.outside]
    # Their repeated rows are of another time and binding of cores, or of other releases; no claim rests on them.
    excluded = ("DeepSpeed core binding", "Megatron-LM")
    rows = [case for case in rows if case.family not in excluded]
    evidence = [line for one in verdicts.read().values() for line in one.evidence]
    assert not any(name in line for line in evidence for name in ("DeepSpeed core binding", "gpt-512x12,"))
    pairs = [(a, b) for a, b in itertools.combinations(rows, 2) if a.family == b.family and not by_others._differ(a, b)]
    apart = [abs(math.log(a.published / b.published)) for a, b in pairs if a.quantity == b.quantity]
    assert len(apart) >= 6
    assert 0.01 < max(apart) < by_others.REPEAT


# ---------------------------------------------------------------- public runs

OF_LIGHTNING = {
    "type": "public", "quantity": "speed", "asks": "every", "margin": 0.2,
    "between": {
        "source": "lightning-minigpt", "by": ["entry", "activation_checkpointing", "micro_batch_size"],
        "control": {"engine": "DDP"}, "arm": {"engine": "DeepSpeed", "strategy": "zero3", "offload": "nothing"},
    },
}  # fmt: skip


def of_public_runs(tmp_path, value=(0, 1), **changes):
    def change(claim, source):
        claim["rule"] = {**OF_LIGHTNING, **changes}
        claim["expected"] = {"value": list(value), "unit": "a speed of {times}", "tolerance": {"exact": True}}

    write(tmp_path, change)
    return verdicts.decide_all(tmp_path)["small.speed.ratio"]


def test_public_runs_decide_by_values_of_the_archive(tmp_path):
    times = {
        (s.entry, s.activation_checkpointing, s.engine): run.totals["seconds_per_step"]
        for run in archive.source("lightning-minigpt")
        if (s := run.setting).engine == "DDP" or (s.engine, s.strategy, s.offload) == ("DeepSpeed", "zero3", "nothing")
    }
    ratios = [t / times[e, c, "DeepSpeed"] for (e, c, engine), t in times.items() if engine == "DDP"]
    verdict = of_public_runs(tmp_path)
    assert (verdict.verdict, verdict.by) == ("agrees, not run", "others")
    assert verdict.observed.value == pytest.approx(max(ratios), rel=1e-5)
    assert f"agrees least, out of {len(ratios)} (" in verdict.why
    assert "We count at most 1 as agreement: agrees in these measurements" in verdict.why
    assert verdict.evidence[-1].startswith("lightning-minigpt: https://github.com/tnachen/minGPT/tree/")


def test_a_verdict_of_public_runs_is_no_bolder_than_its_margin(tmp_path):
    assert of_public_runs(tmp_path, (1, 10)).verdict == "contradicted"
    assert of_public_runs(tmp_path, (1, 10), asks="one").verdict == "open"  # another run might be as fast
    assert of_public_runs(tmp_path, (0, 0.7)).verdict == "open"  # the slowest loss of speed is within the margin
    assert of_public_runs(tmp_path, (0, 0.7), margin=0.02).verdict == "agrees, not run"


def test_equal_losses_of_public_runs_agree():
    rule = {**OF_LIGHTNING, "quantity": "loss", "margin": 0, "between": None, "comparisons": ["gh200-one"]}
    band = (-0.01, 0.01)
    observed = by_public_runs.observe(by_public_runs.ByPublicRuns.model_validate(rule), band)
    assert 0 <= observed.value < 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comparisons": ["zero2-zero3-robot"]}, "give one of the two"),
        ({"comparisons": ["none such"], "between": None}, "has no comparison of pairs named none such"),
        ({"quantity": "loss"}, "no two public runs"),
        ({"between": {**OF_LIGHTNING["between"], "source": "nobody"}}, "no public runs of 'nobody'"),
    ],
)
def test_a_rule_of_public_runs_without_its_pairs_is_refused(tmp_path, changes, message):
    with pytest.raises(Refusal, match=message):
        of_public_runs(tmp_path, **changes)


def test_related_public_runs_are_shown_and_decide_nothing():
    name = "hf-analysis.advice.nvswitch-manageable.others"
    judged = next(one for one in sentences.read() if one.head.claim.id == name)
    (related,) = judged.aside
    assert (related.verdict.verdict, judged.word) == ("contradicted", "agrees, not run")
    displayed = " ".join(in_terminal.text(name).split())
    assert f"Related evidence, which decides nothing: {related.claim.id}: contradicted" in displayed


def test_the_ledger_takes_nothing_from_a_study_that_is_not_whole(monkeypatch, tmp_path):
    """Five of ten starts once decided three claims; the other five opened two of them again."""
    part = tmp_path / "learning-bert"
    part.mkdir()
    for path in (by_records.RECORDS / "learning-bert").iterdir():
        plain = path.with_suffix("")
        lines = records.read_lines(plain).items()
        records.write_lines(part / plain.name, {run_id: line for run_id, line in lines if "-seed9" not in run_id})
    monkeypatch.setattr(by_records, "RECORDS", tmp_path)
    by_records._table.cache_clear()
    with pytest.raises(Refusal, match="planned runs have no outcome yet"):
        by_records.loss_difference("learning-bert", "zero2", "ddp", part="evaluation")
    by_records._table.cache_clear()
