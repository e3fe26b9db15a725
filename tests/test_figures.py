"""Figures: whole and self-contained SVG in the page's colours, and nothing drawn that was not measured."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pandas as pd
import pytest
from synthetic import write_outcome, write_run

from study.compare import table, words
from study.compare.expected import with_theory
from study.compare.words import bytes_text, three_digits
from study.report import drawing, figures
from study.report.drawing import Figure
from study.strategy import file

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"
STRATEGIES = {"ddp": 0.5, "zero2": 0.45, "zero3": 0.8, "zero3_cpu_offload": 2.0}


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> pd.DataFrame:
    """Three seeds of four strategies on 2 and 4 GPUs, `single` on one; zero1 runs out of memory, fsdp2 is skipped."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        write_run(folder, strategy="single", world_size=1, seed=seed, box="gpu", seconds=1.0, study="s")
        for (name, seconds), world_size in itertools.product(STRATEGIES.items(), (2, 4)):
            for repeat in range(2 if name == "ddp" else 1):
                taken = seconds * (1 + 0.01 * seed + 0.004 * repeat) * 2 / world_size
                write_run(folder, strategy=name, world_size=world_size, seed=seed, repeat=repeat, box="gpu",
                          seconds=taken, loss_shift=0.05 if name == "zero3" else 0.0, study="s")  # fmt: skip
        write_run(folder, strategy="zero1", world_size=2, seed=seed, box="gpu", status="out_of_memory", study="s")
    write_outcome(folder, "skipped", strategy="fsdp2")
    return with_theory(table.read([folder]))


@pytest.fixture(scope="module")
def two(everything) -> pd.DataFrame:
    """The runs on 2 GPUs, and `single`."""
    return everything[(everything["world_size"] == 2) | (everything["strategy"] == "single")]


@pytest.fixture(scope="module")
def drawn(everything, two) -> dict[str, Figure]:
    return {
        "loss_curves": figures.loss_curves(table.steps(two), "ddp", two),
        "peak_memory": figures.peak_memory(two),
        "runtime": figures.runtime(two),
        "pareto": figures.pareto(two),
        "world_sizes": figures.world_sizes(everything),
    }


ALL = ["loss_curves", "peak_memory", "runtime", "pareto", "world_sizes"]
OF_RUNS = ["peak_memory", "runtime", "pareto"]


def colours(figure: Figure, name: str) -> int:
    """How often a strategy's colour is in a figure."""
    return figure.svg.lower().count(drawing.style(name).color.lower())


def visible(figure: Figure) -> str:
    """The text that a figure shows."""
    root = ElementTree.fromstring(figure.svg)
    return "\n".join("".join(node.itertext()) for node in root.iter(f"{SVG}text"))


# ---------------------------------------------------------------- what sits in the page


# ---------------------------------------------------------------- what sits in the page


@pytest.mark.parametrize("kind", ALL)
def test_svg_is_whole_has_ids_of_its_own_and_takes_the_pages_colours(drawn, kind):
    figure = drawn[kind]
    root = ElementTree.fromstring(figure.svg)
    nodes = list(root.iter())
    title = root.find(f"{SVG}title")
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == title.get("id")
    assert title.text == figure.title
    assert "8 x NVIDIA H200" in figure.title
    assert 300 < float(root.get("width")) < 700
    ids = [node.get("id") for node in nodes if node.get("id")]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith(figure.name) for name in ids)
    used = {node.get(f"{XLINK}href", "#")[1:] for node in nodes} | set(re.findall(r"url\(#([^)]*)\)", figure.svg))
    assert used - {""} <= set(ids)
    assert "currentColor" in figure.svg
    assert drawing.INK not in figure.svg
    assert not re.search(r"#000000|#ffffff|: (?:black|white)|<style", figure.svg)
    assert figure.svg.count("font-family") == 1  # the root's, which a page's style sheet overrides
    assert "nan" not in figure.svg.lower().replace("nanosecond", "")


@pytest.mark.parametrize("kind", OF_RUNS)
def test_same_input_same_bytes(two, drawn, kind):
    assert getattr(figures, kind)(two) == drawn[kind]
    shuffled = two.sample(frac=1, random_state=0)
    assert getattr(figures, kind)(shuffled) == drawn[kind]


# ---------------------------------------------------------------- one box, one thing trained


@pytest.mark.parametrize(
    "column",
    [
        "box",
        "world_size",
        "workload",
        "size",
        "precision",
        "global_batch_size",
        "num_steps",
        "data_digest",
        "libraries",
    ],
)
@pytest.mark.parametrize("kind", OF_RUNS)
def test_mixed_runs_are_refused(two, kind, column):
    other = two.iloc[:1].assign(**{column: 1 if pd.api.types.is_numeric_dtype(two[column]) else "another"})
    with pytest.raises(ValueError, match=rf"^{column} is .* and .*; a figure is of one"):
        getattr(figures, kind)(pd.concat([two, other]))


@pytest.mark.parametrize("kind", [*OF_RUNS, "world_sizes"])
def test_nothing_to_draw_is_refused(two, kind):
    with pytest.raises(ValueError, match="no run to draw"):
        getattr(figures, kind)(two.iloc[:0])
    with pytest.raises(ValueError, match=r"no run that is ok has .*out_of_memory \(3\)"):
        getattr(figures, kind)(two[two["strategy"] == "zero1"])


def test_unknown_control_is_refused(two):
    with pytest.raises(ValueError, match="control 'zero0' has no steps here; there are single, ddp"):
        figures.loss_curves(table.steps(two), "zero0")


# ---------------------------------------------------------------- what was not measured


@pytest.mark.parametrize("kind", OF_RUNS)
def test_what_has_no_value_is_named_and_not_drawn(drawn, kind):
    text = visible(drawn[kind])
    assert "zero1" in text
    assert "fsdp2" in text
    assert "out of memory" in text
    assert "skipped" in text
    assert colours(drawn[kind], "zero1") == colours(drawn[kind], "fsdp2") == 0


def test_one_bar_of_a_strategy_is_measured(drawn):
    panels, in_legend = 2, 1  # all of the peak; model states alone
    filled = f'"fill: {figures.MEASURED_PARTS["parameters"]}"'
    assert drawn["peak_memory"].svg.lower().count(filled.lower()) == panels * len(["single", *STRATEGIES]) + in_legend


def test_curves_that_end_early_are_named(drawn, two):
    assert "zero1: 3 of 3 runs ended at step 3" in visible(drawn["loss_curves"])
    assert "fsdp2: skipped, no curve" in visible(drawn["loss_curves"])
    steps = table.steps(two)
    cut = steps[~((steps["strategy"] == "zero2") & (steps["seed"] == 1) & (steps["step"] > 9))]
    assert "zero2: 1 of 3 runs ended at step 9, left out" in visible(figures.loss_curves(cut, "ddp"))


def test_part_of_the_runs_without_a_value(two):
    label = two.index[(two["strategy"] == "zero2") & (two["seed"] == 1)][0]
    killed = two.copy()
    killed.loc[label, "status"] = "killed"
    assert "(1 of 3 killed)" in visible(figures.runtime(killed))


def test_status_ok_without_a_value_is_not_measured(two):
    unmeasured = two.assign(rank_parts=two["rank_parts"].where(two["strategy"] != "zero2"), share_of_others=0.5)
    assert "not measured" in visible(figures.peak_memory(unmeasured))  # what disturbs a run takes its times alone
    assert drawing.unmeasured(unmeasured.assign(seconds_per_step=None), "seconds_per_step")["zero2"] == "disturbed"


def test_world_sizes_name_where_nothing_was_measured(drawn):
    text = visible(drawn["world_sizes"])
    assert "zero1 on 2: out of memory" in text
    assert "fsdp2 on 2: skipped" in text


# ---------------------------------------------------------------- what each shows


def test_identical_curves_say_so(two):
    steps = table.steps(two[two["strategy"].isin(["ddp", "zero2"]) & (two["repeat"] == 0)])
    control = steps[steps["strategy"] == "ddp"]
    same = pd.concat([control, control.assign(strategy="zero2", run_id="same")])
    assert "identical at every step" in visible(figures.loss_curves(same, "ddp"))
    assert "identical" not in visible(figures.loss_curves(steps, "ddp"))


def rank(**parts: int | None) -> dict[str, object]:
    known = {"parameters": 2**30, "gradients": 2**30, "optimizer_states": 2**31, "communication_buffers": 2**29}
    return {**known, "resting": {**known, "gradients": 0, "host": parts.get("host", 0)}, "peak": 6 * 2**30, **parts}


def test_on_top_of_what_rests_comes_the_rest():
    """Gradients as the optimizer steps are no part of a peak that was in backward."""
    found = figures.parts_at_peak(rank(), on_gpu=True)
    assert (found["rest"], found["gradients"]) == (6 * 2**30 - 3 * 2**30 - 2**29, 0)
    found = figures.parts_at_peak(rank(host=2**31), on_gpu=True)  # what is on the host is not in the GPU's peak
    assert (found["rest"], found["on_gpu"]) == (6 * 2**30 - 2**30 - 2**29, 2**30)
    assert "states left on the GPU" not in found


def test_the_bar_is_of_the_rank_with_the_most(two):
    parts = [[rank(), rank(peak=9 * 2**30)]] * len(two)
    assert "9 GiB" in visible(figures.peak_memory(two.assign(rank_parts=parts)))


def test_the_axis_of_runtime_says_that_it_is_logarithmic(two):
    near = two[two["strategy"].isin(["ddp", "zero2"])]
    assert "logarithmic" not in visible(figures.runtime(near))
    far = near.assign(seconds_per_step=near["seconds_per_step"].where(near["strategy"] == "ddp", 50.0))
    assert "(axis logarithmic)" in visible(figures.runtime(far))


def test_shared_cores_are_named(everything):
    shared = everything.assign(oversubscribed=everything["world_size"] == 4)
    assert "4 processes: cores or GPUs were shared" in visible(figures.world_sizes(shared))


def test_the_front_is_what_no_other_beats():
    seconds = pd.Series({"fast": 1.0, "worse": 2.0, "small": 3.0, "tied": 3.0, "slow": 4.0})
    size = pd.Series({"fast": 9.0, "worse": 9.0, "small": 2.0, "tied": 3.0, "slow": 2.0})
    assert figures.front(seconds, size) == ["fast", "small"]


# ---------------------------------------------------------------- colours, order and numbers


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("colour", [*drawing.COLOURS.values(), *drawing.OTHER_COLOURS])
@pytest.mark.parametrize("page", ["#ffffff", "#121212"])
def test_colours_are_seen_on_both_pages(colour, page):
    assert colour == drawing.INK or contrast(colour, page) >= 3


def test_every_strategy_has_a_look_of_its_own():
    assert (tuple(drawing.COLOURS), tuple(drawing.MARKS)) == (words.STAGES, words.KINDS)
    looks = [drawing.style(name) for name in file.names()]
    assert len({str(look) for look in looks}) == len(looks)
    assert drawing.style("zero3_cpu_offload").color == drawing.style("zero3").color
    assert drawing.style("zero3_cpu_offload").marker == drawing.style("zero2_cpu_offload").marker
    assert drawing.style("zero2_reduce_5e7").color == drawing.style("zero2").color
    assert drawing.style("mine_own") == drawing.style("mine_own")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234.5, "1,234"),
        (99.96, "100"),
        (12.345, "12.3"),
        (-0.5, "\N{MINUS SIGN}0.5"),
        (2.14e-6, "2.1e-6"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert three_digits(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(3 * 2**30, "3 GiB"), (512 * 2**20, "512 MiB"), (1000, "0.977 KiB"), (2**30 - 1, "1,024 MiB")]
)
def test_bytes_come_in_a_unit_that_fits(value, text):
    assert bytes_text(value) == text


def test_order_is_from_nothing_sharded_to_everything_offloaded():
    assert words.in_order(["mine", "zero3_tuned", "zero1", "zero3", "ddp", "zero3_mine", "single", "ddp"]) == [
        "single", "ddp", "zero1", "zero3", "zero3_tuned", "zero3_mine", "mine",
    ]  # fmt: skip
