"""The planner page: every number is a prediction's, what does not fit says so, and trees are judged case by case."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from reported import read as text_of

from study import planner
from study.errors import Refusal
from study.planner import advice_text, choose, published_rows
from study.report import markup
from study.report.pages import planner as page
from study.report.words import signed_percent
from study.theory import measured_by_others, model_states, step_time

SVG = "{http://www.w3.org/2000/svg}"


def asked(gpu: str = "a100-80gb", num_gpus: int = 8, batch: int = 16, length: int = 1024, **more) -> planner.Asked:
    return planner.Asked(gpu=gpu, num_gpus=num_gpus, sequence_length=length, global_batch_size=batch, **more)


@pytest.fixture(scope="module")
def advice():
    """A model of which some strategies fit and others do not."""
    return planner.advise("gpt-j-6b", asked("a100-40gb"))


@pytest.fixture(scope="module")
def found():
    return page.load()


def rows_of(piece: markup.Html) -> dict[str, list[str]]:
    """The cells of each row, by its heading."""
    found = [
        [
            " ".join(html.unescape(re.sub("<[^>]*>", " ", cell)).split())
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
        ]
        for row in re.findall("<tr>.*?</tr>", piece.text)
    ]
    return {cells[0]: cells[1:] for cells in found}


# ---------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        ("gpt2-xxl", {}, "unknown model 'gpt2-xxl': near are gpt2-xl"),
        ("gpt2", {"gpu": "a100"}, "unknown GPU 'a100': near are a100"),
        ("gpt2", {"batch": 12}, "12 does not divide over"),
        ("gpt2", {"num_gpus": 12, "batch": 24}, "12 GPUs do not fill nodes of 8"),
    ],
)
def test_bad_parameters_are_refused_in_a_line(model, settings, said):
    with pytest.raises(Refusal, match=re.escape(said)) as refused:
        planner.advise(model, asked(**settings))
    assert "\n" not in str(refused.value)


def test_first_words_say_that_nothing_is_measured(advice):
    text = text_of(page.in_words(advice))
    assert "gpt-j-6b, 6,050,882,784 parameters, on 8 x a100-40gb: 16 sequences of 1,024 tokens per step." in text
    assert f"Recommended: {advice.recommended.strategy.name}: " in text
    assert "Nothing on this page is measured" in text
    assert "Assumed: fused kernels; attention sdpa (FlashAttention-2); dropout off; loss fused; adamw, fused." in text


def test_what_a_longer_sequence_takes_is_noted():
    longer = planner.advise("gpt2", asked(length=2048))
    assert "Note: gpt2 has 1,024 positions" in text_of(page.in_words(longer))


def test_where_nothing_fits_it_is_said():
    nothing = planner.advise("llama-2-70b", asked("t4", 1, batch=1))
    assert "Recommended" not in text_of(page.in_words(nothing))
    assert "None fits; " in text_of(page.in_words(nothing))
    assert text_of(page.front(nothing)) == "No strategy fits at any split of the batch."
    rows = rows_of(page.memory(nothing))
    assert rows.pop("strategy")[0] == "free"
    assert {" ".join(cells[0].split()[:2]) for cells in rows.values()} == {"short of", "too little"}
    assert page.speed_against_memory(nothing).alt.endswith("of which 0 fit.")


# ---------------------------------------------------------------- tables


def test_memory_table_has_what_is_predicted(advice):
    rows, parts = rows_of(page.memory(advice)), rows_of(page.memory_parts(advice))
    head, names = rows.pop("strategy"), parts.pop("strategy")
    assert list(rows) == list(parts) == [option.strategy.name for option in advice.options]
    for option in advice.options:
        cells = dict(zip(head, rows[option.strategy.name], strict=True))
        one = option.prediction
        assert cells["needed"] == f"{one.needed_bytes / 2**30:.1f}"
        of_part = dict(zip(names, parts[option.strategy.name], strict=True))
        assert float(of_part["parameters"] or 0) == pytest.approx(one.peak.parts["parameters"] / 2**30, abs=0.051)
        assert cells["free"] == (
            f"{one.free_bytes / 2**30:.1f}" if one.fits else f"short of {-one.free_bytes / 2**30:.1f}"
        )
    assert {bool(option.prediction.fits) for option in advice.options} == {True, False}


def test_speed_table_gives_none_to_what_does_not_fit(advice):
    rows = rows_of(page.speed(advice))
    head = rows.pop("strategy")
    for option in advice.options:
        cells = dict(zip(head, rows[option.strategy.name], strict=True))
        if option.prediction.fits:
            total = float(cells["seconds per step"].split()[0])
            assert total == pytest.approx(option.prediction.step.total, rel=0.01)
            assert cells["tokens/s per GPU"].replace(",", "") == f"{option.prediction.tokens_per_second_per_gpu:.0f}"
        else:
            assert cells["seconds per step"] == "does not fit"
            assert cells["tokens/s per GPU"] == cells["$ per billion tokens"] == ""


def test_front_is_beaten_by_nothing_that_fits(advice):
    every = choose.choices(advice)
    front = choose.pareto(every)
    assert 1 < len(front) < len(every)
    for kept in front:
        one = kept.prediction
        assert one.fits
        assert not [
            other
            for other in every
            if other.prediction.fits
            and other.prediction.peak.total < one.peak.total
            and other.prediction.tokens_per_second_per_gpu > one.tokens_per_second_per_gpu
        ]
    assert max(choice.prediction.tokens_per_second_per_gpu for choice in every if choice.prediction.fits) == (
        front[-1].prediction.tokens_per_second_per_gpu
    )
    assert len(re.findall('<th scope="row">', page.front(advice).text)) == len(front)


def test_paper_and_engine_differ_by_what_is_named(advice):
    rows = rows_of(page.differences(advice))
    option = next(option for option in advice.options if option.strategy.name == "ddp")
    paper = model_states.paper_bytes(option.prediction.engine, advice.shape.num_params, "stepping").total
    by_paper, held, difference, why = rows["ddp"]
    assert float(by_paper) == pytest.approx(paper / 2**30, abs=0.05)
    assert float(held) - float(by_paper) == pytest.approx(float(difference), abs=0.11)
    assert why == f"ddp-buckets {difference}"
    assert "reduce-bucket" in rows["zero3"][-1]
    explained = text_of(page.reasons(advice))
    assert "ddp-buckets. DistributedDataParallel keeps flat buckets" in explained
    assert all(
        name.split()[0] in explained for cells in rows.values() for name in re.findall(r"[a-z0-9]+-[a-z-]+", cells[-1])
    )


@pytest.mark.parametrize(
    ("share", "shown"), [(0.031, "+3 %"), (-0.5, "\N{MINUS SIGN}50 %"), (-0.0004, "+0 %"), (0.0, "+0 %")]
)
def test_signed_percent(share, shown):
    assert signed_percent(share).replace("\N{NO-BREAK SPACE}", " ") == shown


# ---------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def drawn(advice, found):
    return {
        "memory_by_part": page.memory_by_part(advice),
        "memory_by_gpus": page.memory_by_gpus(advice),
        "speed_against_memory": page.speed_against_memory(advice),
        "published_speed": page.published_speed(found),
    }


AXES = {
    "memory_by_part": ["predicted memory of a GPU, GiB", "usable: ", "optimizer states", "allocator's slack"],
    "memory_by_gpus": ["number of GPUs (axis logarithmic)", "predicted memory of a GPU, GiB", "fsdp2_no_reshard"],
    "speed_against_memory": ["predicted memory of a GPU, GiB", "predicted tokens/s per GPU", "does not fit"],
    "published_speed": ["published tokens/s per GPU (axis logarithmic)", "predicted over published", "fp8"],
}


@pytest.mark.parametrize("kind", AXES)
def test_figure_is_whole_and_names_its_axes(drawn, kind):
    figure = drawn[kind]
    root = ElementTree.fromstring(figure.svg)
    text = "\n".join("".join(node.itertext()) for node in root.iter(f"{SVG}text"))
    assert all(word in text for word in AXES[kind]), text
    assert root.find(f"{SVG}title").text == figure.alt
    assert len(re.findall(r"\d", figure.alt)) >= 3
    assert re.search("[Pp]redict", figure.caption)
    assert "#010203" not in figure.svg  # drawn in the page's own ink
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith(figure.name) for name in ids)


def test_figures_of_other_questions_have_other_names(drawn):
    other = planner.advise("gpt-j-6b", asked("a100-40gb", batch=32))
    assert page.memory_by_part(other).name != drawn["memory_by_part"].name


def test_memory_falls_with_more_gpus_only_where_something_is_sharded(advice):
    needed = choose.needed_by_gpus(advice)
    assert set(needed["single"]) == {1}
    assert needed["zero3"][64] < needed["zero3"][2] / 4
    assert needed["ddp"][64] == needed["ddp"][2]


# ---------------------------------------------------------------- trust


def test_validation_is_of_the_models_as_they_are(found):
    """What the command wrote is what theory says now; where this fails, run it again and commit what it writes."""
    for row, entry in zip(found.rows, found.content["rows"], strict=True):
        time = step_time.seconds(row.shape, row.engine, row.job, row.box)
        now = step_time.tokens_per_second_per_gpu(row.job, time.total)
        assert entry["predicted"] == pytest.approx(float(now), rel=1e-3), f"stale: run {published_rows.COMMAND}"
        assert entry["error"] == pytest.approx(row.tokens_per_second_per_gpu / now - 1, abs=1e-3)
    assert [case["name"] for case in found.content["cases"]] == [case.name for case in measured_by_others.cases()]


def test_trust_is_said_with_unseen_errors_before_seen_ones(found):
    text = text_of(page.trust_in_words(found)).replace("\N{NO-BREAK SPACE}", " ")
    summaries = [
        found.summary(split, "planner", "grade", grade)
        for split, grade in (
            ("family", "A"),
            ("family", "B"),
            ("model size", "LLM Foundry"),
            ("nothing", "LLM Foundry"),
        )
    ]
    said = [f"{100 * one['median']:.1f} % in the median, {100 * abs(one['worst']):.0f} % at worst" for one in summaries]
    places = [text.index(words) for words in said]
    assert places == sorted(places)
    assert "A rule of thumb comes nearer here" in text
    assert "Nothing is fitted to it" in text


def test_errors_stand_beside_rules_of_thumb_and_the_worst_is_named(found):
    shown = page.errors(found)
    assert {"planner", "constant share of peak", "line per GPU"} <= set(rows_of(shown))
    text = text_of(shown)
    assert "cannot predict" in text  # the line, without a card, and without a generation
    for row in found.content["errors"]:
        # Of families, and so of grade C, the table without them has all.
        if row["predictor"] == "planner" and (row["by"] not in ("grade", "family") or row["left_out"] == "family"):
            assert row["worst_case"] in text


def test_intervals_stand_with_how_often_they_held(found):
    text = text_of(page.intervals(found))
    for entry in found.content["intervals"]:
        assert f"{entry['inside']} of {entry['predictions']} {entry['held']} of {entry['tried']}" in text


def test_an_answer_says_which_errors_its_times_rest_on(advice, capsys):
    sentences = {option.prediction.step.evidence.sentence for option in advice.options}
    assert len(sentences) >= 3  # FSDP, other engines, offload; and of each what no published row has
    shown = text_of(page.speed(advice))
    said = " ".join(advice_text.text(advice).split())
    content = advice_text.content(advice)
    for option, entry in zip(advice.options, content["strategies"], strict=True):
        sentence = option.prediction.step.evidence.sentence
        assert entry["seconds_per_step_rests_on"] == sentence
        assert sentence in said
        assert sentence[1:] in shown


def test_published_numbers_stand_beside_predicted(found):
    shown = page.cases(found)
    assert shown.text.count("<em>") == len(found.content["cases"])
    assert "A800 is an A100-80GB with NVLink at 400 GB/s" in text_of(shown)
    rows = rows_of(shown)
    name = next(name for name in rows if name.startswith("qwen2.5-3b, 2 x a100-40gb, zero3 offload optimizer"))
    assert rows[name][2] == "2.38"


def test_memory_counts_what_was_measured_twice_alike_once():
    cases = published_rows.amounts()
    peaks_of_tensors = [case for case in cases if case.quantity == "peak_allocated_bytes" and case.grade == "A"]
    assert len(peaks_of_tensors) == 29
    assert 0 < sum(map(published_rows.activations_decide, peaks_of_tensors)) < 29


def test_what_trained_and_is_said_not_to_fit_is_counted():
    wrong = [one for one in published_rows.fits_verdicts() if one.trained != one.predicted]
    assert wrong
    assert all(one.trained for one in wrong)  # none that ran out of memory is said to fit
    assert {"fms-acceleration liger", "BigScience GPT"} <= {one.case.family for one in wrong}


def test_published_memory_stands_beside_estimators():
    text = text_of(page.memory_cases())
    for estimator in ("planner", "DeepSpeed's estimator", "accelerate's estimator"):
        assert estimator in text
    assert "mistral-7b, 1 x a100-80gb" in text


def test_validation_of_something_else_is_refused(tmp_path):
    path = tmp_path / "there.json"
    with pytest.raises(Refusal, match=r"^there.json: No such file or directory; run python tools/planner_acc"):
        page.load(path)
    for content in ("{", "{}", "[1]"):
        path.write_text(content)
        with pytest.raises(Refusal, match=r"^there.json: not what python tools/planner_accuracy.py writes; run "):
            page.load(path)
    path.write_text(json.dumps({"rows": [{"row": "another"}]}))
    with pytest.raises(Refusal, match=r"^there.json: has other rows than mpt_throughput.csv; run "):
        page.load(path)
