"""Do the published trees answer as their text says, and is their advice judged by what the planner finds?"""

from __future__ import annotations

import itertools

import pytest

from study.strategy import file
from study.theory.decision_trees import KINDS, TREES, Question, Recommendation, TreeOutcome, compare, summarize

EVERYTHING = dict.fromkeys(("ddp", "zero1", "zero2", "zero3"), True)
BILLION = 1_000_000_000


def ask(tree: str, *, fits: str | None = None, **changes) -> str | None:
    """What a tree advises of 1B parameters on 8 GPUs of 80 GiB; `fits`: the stages that do, by default all."""
    return question_of(fits=fits, tree=tree, **changes).strategy


def question_of(*, tree: str, fits: str | None = None, **changes) -> Recommendation:
    found = EVERYTHING if fits is None else {name: name in fits.split() for name in EVERYTHING}
    asked = {
        "num_params": BILLION,
        "num_gpus": 8,
        "gpu_memory_bytes": 80 * 2**30,
        "has_fast_link": True,
        "fits": found,
        "purpose": "research",
        "speed_critical": True,
    }
    return TREES[tree](Question(**asked | changes))


# ---------------------------------------------------------------- every rule, at its boundary


@pytest.mark.parametrize(
    ("fits", "advised"), [("ddp zero2 zero3", "ddp"), ("zero2 zero3", "zero2"), ("zero3", "zero3"), ("", "zero3")]
)
def test_hf_tree_goes_by_what_fits(fits, advised):
    """Also to ZeRO-3 where that does not fit: its last arrow asks nothing."""
    assert ask("hf-analysis-tree", fits=fits) == advised


@pytest.mark.parametrize(
    ("num_params", "recommended", "by_cost"),
    [
        (7 * BILLION, "ddp", "ddp"),
        (7 * BILLION + 1, "zero2", None),  # the section on costs leaves a gap up to 9B
        (9 * BILLION - 1, "zero2", None),
        (9 * BILLION, "zero2", "zero2"),
        (13 * BILLION, "zero2", "zero2"),
        (13 * BILLION + 1, "zero3", "zero3"),
    ],
)
def test_hf_sizes(num_params, recommended, by_cost):
    assert ask("hf-analysis-recommendations", num_params=num_params) == recommended
    assert ask("hf-analysis-sizes", num_params=num_params) == by_cost


def test_hf_small_models_where_memory_does_not_permit():
    assert ask("hf-analysis-sizes", fits="zero2 zero3") is None
    assert ask("hf-analysis-recommendations", fits="zero2 zero3") == "ddp"


def test_hf_recommends_for_production_by_nodes():
    assert ask("hf-analysis-recommendations", purpose="production") == "zero2"
    assert ask("hf-analysis-recommendations", purpose="production", num_nodes=2) == "zero3"


def test_hf_purpose():
    assert ask("hf-analysis-purpose", purpose="production") == "zero2"
    assert ask("hf-analysis-purpose", purpose="research") == "zero3"


@pytest.mark.parametrize(
    ("fits", "fastest", "largest"),
    [("ddp zero2 zero3", "ddp", "zero3"), ("zero2 zero3", "zero2", "zero3"), ("ddp zero2", "ddp", "zero2"), ("",) * 3],
)
def test_hf_priority_takes_the_first_that_fits(fits, fastest, largest):
    assert ask("hf-analysis-priority", fits=fits, speed_critical=True) == (fastest or None)
    assert ask("hf-analysis-priority", fits=fits, speed_critical=False) == (largest or None)


def test_hf_bandwidth():
    assert ask("hf-analysis-bandwidth", has_fast_link=True) is None
    assert ask("hf-analysis-bandwidth", has_fast_link=False) == "zero2"
    assert ask("hf-analysis-bandwidth", has_fast_link=False, fits="zero3") == "zero3"


@pytest.mark.parametrize(
    ("batches", "advised"),
    [
        ((32, 64), "ddp"),
        ((96, 144, 192, 384), "zero2"),
        ((512, 4096), "zero3"),
        ((31, 65, 95, 145, 191, 385, 511, None), None),
    ],
)
def test_hf_batch(batches, advised):
    assert {ask("hf-analysis-batch", global_batch_size=size) for size in batches} == {advised}


def test_hf_conclusion():
    assert ask("hf-analysis-conclusion", purpose="production") == "zero3"
    assert ask("hf-analysis-conclusion", purpose="research") is None


def test_hf_uses_no_zero_on_one_gpu():
    trees = [name for name in TREES if name.startswith("hf-analysis")]
    assert {ask(name, num_gpus=1, num_params=70 * BILLION, fits="") for name in trees} == {"single"}
    assert "single" not in {ask(name, num_gpus=1) for name in TREES if name not in trees}


def test_blog_insight():
    assert ask("zero3-blog-insight", num_params=10 * BILLION) == "zero2"
    assert ask("zero3-blog-insight", num_params=10 * BILLION + 1) == "zero3"
    assert ask("zero3-blog-insight", num_params=10 * BILLION, fits="zero3") == "zero2_cpu_offload"
    assert ask("zero3-blog-insight", num_params=10 * BILLION + 1, fits="") == "zero3_cpu_offload"


def test_blog_offload():
    plenty = 1000 * 2**30
    assert ask("zero3-blog-offload", num_params=10 * BILLION, gpu_memory_bytes=plenty) is None
    assert ask("zero3-blog-offload", num_params=10 * BILLION + 1, gpu_memory_bytes=plenty) == "zero3_cpu_offload"
    # 1B weights of 2 bytes, and half as much again.
    assert ask("zero3-blog-offload", gpu_memory_bytes=3 * BILLION) is None
    assert ask("zero3-blog-offload", gpu_memory_bytes=3 * BILLION - 1) == "zero3_cpu_offload"


def test_blog_from_one_billion_on():
    assert ask("zero3-blog-takeaways", num_params=BILLION) is None
    assert ask("zero3-blog-takeaways", num_params=BILLION + 1) == "zero3"
    assert ask("zero3-blog-nvme", num_params=BILLION - 1) is None
    assert ask("zero3-blog-nvme", num_params=BILLION) == "zero3_nvme_offload"


def test_blog_multi_node():
    assert ask("zero3-blog-multi-node") is None
    assert ask("zero3-blog-multi-node", num_nodes=2, speed_critical=True) == "zero3_cpu_offload"
    assert ask("zero3-blog-multi-node", num_nodes=2, speed_critical=False) == "zero3_nvme_offload"


@pytest.mark.parametrize(
    ("fits", "by_need", "start"),
    [
        ("ddp zero1 zero2 zero3", "zero1", "zero2"),
        ("zero2 zero3", "zero2", "zero2"),
        ("zero3", "zero3", "zero2_cpu_offload"),
        ("", "zero3_cpu_offload", "zero2_cpu_offload"),
    ],
)
def test_stages(fits, by_need, start):
    assert ask("stages-analysis-need", fits=fits) == by_need
    assert ask("stages-analysis-start", fits=fits) == start


# ---------------------------------------------------------------- advice


@pytest.mark.parametrize("tree", TREES)
def test_advice_names_a_file_of_the_study_and_quotes_a_short_phrase(tree):
    advice = [
        question_of(
            tree=tree, num_params=num_params, fits=fits, has_fast_link=fast, purpose=purpose, speed_critical=speed,
            num_nodes=num_nodes, global_batch_size=batch,
        )
        for num_params, fits, fast, purpose, speed, num_nodes, batch in itertools.product(
            (BILLION // 2, 2 * BILLION, 9 * BILLION, 70 * BILLION), ("", "zero3", "zero2 zero3", None), (True, False),
            ("production", "research"), (True, False), (1, 2), (None, 32, 96, 192, 512),
        )
    ]  # fmt: skip
    assert {a.strategy for a in advice} <= {*file.names(), None}
    assert {a.strategy for a in advice} - {None}
    assert all(len(a.phrase.split()) <= 12 for a in advice if a.phrase)
    assert all(a.phrase for a in advice if a.strategy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_params": 0}, "num_params 0: must be positive"),
        ({"num_gpus": -1}, "num_gpus -1"),
        ({"gpu_memory_bytes": 0}, "gpu_memory_bytes 0"),
        ({"num_nodes": 0}, "num_nodes 0"),
        ({"purpose": "prod"}, "purpose 'prod': must be 'production' or 'research'"),
    ],
)
def test_a_question_that_means_nothing(changes, message):
    with pytest.raises(ValueError, match=message):
        ask("hf-analysis-purpose", **changes)


def test_a_tree_that_asks_for_what_is_not_known():
    question = Question(
        num_params=1, num_gpus=2, gpu_memory_bytes=1, has_fast_link=True, fits={"ddp": False}, purpose="research",
        speed_critical=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="fits: nothing of zero2"):
        TREES["hf-analysis-tree"](question)


# ---------------------------------------------------------------- beside the planner

# ddp is fastest and does not fit; of it and of zero1 nothing may be read.
RESULTS = {"ddp": (False, 900.0), "zero1": (False, None), "zero2": (True, 100.0), "zero3": (True, 95.0)}


def advise(name: str | None) -> Recommendation:
    return Recommendation(name, "section", "phrase")


@pytest.mark.parametrize(
    ("advised", "changes", "outcome"),
    [
        ("zero2", {}, TreeOutcome("agrees", "zero2", "zero2", 0)),
        ("zero3", {}, TreeOutcome("agrees", "zero3", "zero2", pytest.approx(0.05))),
        ("zero3", {"zero3": (True, 94.9)}, TreeOutcome("slower", "zero3", "zero2", pytest.approx(0.051))),
        ("ddp", {}, TreeOutcome("out of memory", "ddp", "zero2", None)),
        (None, {}, TreeOutcome("no answer", None, "zero2", None)),
        ("ddp", {"zero2": (False, 0.0), "zero3": (False, 0.0)}, TreeOutcome("nothing fits", "ddp", None, None)),
        (None, {"zero2": (False, 0.0), "zero3": (False, 0.0)}, TreeOutcome("nothing fits", None, None, None)),
    ],
)
def test_advice_beside_the_planner(advised, changes, outcome):
    assert compare(advise(advised), RESULTS | changes) == outcome


def test_advice_that_the_planner_did_not_look_at():
    with pytest.raises(ValueError, match="results: nothing of zero3_nvme_offload"):
        compare(advise("zero3_nvme_offload"), RESULTS)


def test_summary():
    outcomes = [
        compare(advise(name), RESULTS | {"zero3": (True, speed)})
        for name, speed in [("zero2", 1), ("zero3", 99), ("zero3", 90), ("zero3", 80), ("zero3", 40), (None, 1)]
    ]
    found = summarize([*outcomes, compare(advise("ddp"), RESULTS), compare(advise("ddp"), {"ddp": (False, 0.0)})])
    assert found.num_cases == 8
    assert found.shares == {
        "agrees": 2 / 8, "slower": 3 / 8, "out of memory": 1 / 8, "no answer": 1 / 8, "nothing fits": 1 / 8,
    }  # fmt: skip
    assert set(found.shares) == set(KINDS)
    # Of the slower ones alone: what keeps up does not dilute it.
    assert found.median_left_behind == pytest.approx(0.2)
    assert found.worst_left_behind == pytest.approx(0.6)


def test_summary_without_a_slower_case_or_without_any():
    found = summarize([compare(advise("zero2"), RESULTS)])
    assert (found.median_left_behind, found.worst_left_behind) == (None, None)
    with pytest.raises(ValueError, match="outcomes: none"):
        summarize(iter([]))
