"""Figures: whole and self-contained SVG, words computed from the data, and nothing drawn that was not measured."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from matplotlib.figure import Figure as Canvas
from matplotlib.transforms import Bbox
from synthetic import write_outcome, write_run

from study.compare import differences, table, words
from study.compare.expected import with_theory
from study.compare.words import bytes_text, in_order, three_digits
from study.report import figures
from study.report.figures import drawing, forest, front, losses, memory, worlds
from study.report.words import seconds_unit
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
def compared(two) -> pd.DataFrame:
    return differences.compare(two, metrics=["seconds_per_step", "final_loss", "model_state_bytes"])


@pytest.fixture(scope="module")
def drawn(everything, two, compared) -> dict[str, figures.Figure]:
    return {
        "loss_curves": figures.loss_curves(table.steps(two), "ddp", two),
        "peak_memory": figures.peak_memory(two),
        "runtime": figures.runtime(two),
        "pareto": figures.pareto(two),
        "world_sizes": figures.world_sizes(everything),
        "differences": figures.differences(compared[compared["metric"] == "seconds_per_step"]),
    }


ALL = ["loss_curves", "peak_memory", "runtime", "pareto", "world_sizes", "differences"]
OF_RUNS = ["peak_memory", "runtime", "pareto"]


def colours(figure: figures.Figure, name: str) -> int:
    """How often a strategy's colour is in a figure."""
    return figure.svg.lower().count(drawing.style(name).color.lower())


def visible(figure: figures.Figure) -> str:
    """The text that a figure shows."""
    root = ElementTree.fromstring(figure.svg)
    return "\n".join("".join(node.itertext()) for node in root.iter(f"{SVG}text"))


# ---------------------------------------------------------------- what sits in the page


@pytest.mark.parametrize("kind", ALL)
def test_svg_is_whole(drawn, kind):
    figure = drawn[kind]
    root = ElementTree.fromstring(figure.svg)
    title = root.find(f"{SVG}title")
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == title.get("id")
    assert title.text == figure.alt
    assert root.get("style").startswith("max-width:100%;height:auto")
    width, height = float(root.get("width")), float(root.get("height"))
    box = [float(value) for value in root.get("viewBox").split()]
    assert 300 < width < 700
    assert 100 < height < 1500
    assert box[2] / box[3] == pytest.approx(width / height, rel=0.01)


@pytest.mark.parametrize("kind", ALL)
def test_ids_are_the_figures_own(drawn, kind):
    figure = drawn[kind]
    nodes = list(ElementTree.fromstring(figure.svg).iter())
    ids = [node.get("id") for node in nodes if node.get("id")]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith(figure.name) for name in ids)
    used = {node.get(f"{XLINK}href", "#")[1:] for node in nodes} | set(re.findall(r"url\(#([^)]*)\)", figure.svg))
    assert used - {""} <= set(ids)
    assert len(used) > 1


def test_names_tell_figures_apart(everything, drawn):
    four = everything[everything["world_size"] == 4]
    names = {figure.name for figure in drawn.values()} | {figures.runtime(four).name}
    assert len(names) == len(drawn) + 1
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


@pytest.mark.parametrize("kind", ALL)
def test_ink_and_font_are_the_pages(drawn, kind):
    svg = drawn[kind].svg
    assert "currentColor" in svg
    assert drawing.INK not in svg
    assert not re.search(r"#000000|#ffffff|: (?:black|white)", svg)
    assert svg.count("font-family") == 1  # the root's, which a page's style sheet overrides
    assert "<style" not in svg  # its rules would be the page's
    assert "nan" not in svg.lower().replace("nanosecond", "")


def test_a_notebook_shows_the_caption(drawn):
    figure = drawing.Figure("name", "<svg/>", "alt", "a < b & c")
    part = '<div class="drawing" role="group" tabindex="0"><svg/></div>'
    assert figure._repr_html_() == f'<figure class="plot">{part}<figcaption>a &lt; b &amp; c</figcaption></figure>'


@pytest.mark.parametrize("kind", ALL)
def test_words_have_numbers_and_setting(drawn, kind):
    figure = drawn[kind]
    assert len(re.findall(r"\d", figure.alt)) >= 3
    assert "n = " in figure.caption
    assert "gpt-wikitext tiny, fp32, 8 sequences per step" in figure.caption.replace("tiny, 8", "tiny, fp32, 8")
    assert figure.caption.count("8 x NVIDIA H200") == 1


@pytest.mark.parametrize("kind", OF_RUNS)
def test_same_input_same_bytes(two, drawn, kind):
    assert getattr(figures, kind)(two) == drawn[kind]
    shuffled = two.sample(frac=1, random_state=0)
    assert getattr(figures, kind)(shuffled) == drawn[kind]


def test_settings_of_matplotlib_stay(two):
    before = dict(matplotlib.rcParams)
    figures.runtime(two)
    assert dict(matplotlib.rcParams) == before


# ---------------------------------------------------------------- one box, one thing trained


@pytest.mark.parametrize(
    "column", ["box", "workload", "size", "precision", "global_batch_size", "num_steps", "data_digest", "libraries"]
)
@pytest.mark.parametrize("kind", OF_RUNS)
def test_mixed_runs_are_refused(two, kind, column):
    other = two.iloc[:1].assign(**{column: 1 if pd.api.types.is_numeric_dtype(two[column]) else "another"})
    with pytest.raises(ValueError, match=rf"^{column} is .* and .*; a figure is of one"):
        getattr(figures, kind)(pd.concat([two, other]))


def test_mixed_curves_are_refused(two):
    other = two.iloc[:1].assign(box="another")
    with pytest.raises(ValueError, match=r"^box is 8 x NVIDIA H200 and another"):
        figures.loss_curves(table.steps(pd.concat([two, other])), "ddp")


@pytest.mark.parametrize("kind", OF_RUNS)
def test_two_world_sizes_are_refused(everything, kind):
    with pytest.raises(ValueError, match=r"^world_size is 2 and 4"):
        getattr(figures, kind)(everything)


def test_several_metrics_are_refused(compared):
    with pytest.raises(ValueError, match=r"^metric is final_loss, model_state_bytes and seconds_per_step"):
        figures.differences(compared)


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
    figure = drawn[kind]
    text = visible(figure)
    assert "zero1" in text
    assert "fsdp2" in text
    assert "out of memory" in text
    assert "skipped" in text
    assert "Without a value: zero1: out of memory; fsdp2: skipped." in figure.caption
    assert "zero1: out of memory" in figure.alt
    assert colours(figure, "zero1") == colours(figure, "fsdp2") == 0


def test_bars_are_those_of_measured_ranks(two, drawn):
    ranks = sum(1 if name == "single" else 2 for name in ["single", *STRATEGIES])
    panels, in_legend = 2, 1  # all of the peak; model states alone
    filled = f'"fill: {memory.COLOURS["parameters"]}"'  # hatches of the same colour are predicted
    assert drawn["peak_memory"].svg.lower().count(filled.lower()) == panels * ranks + in_legend


def test_curves_that_end_early_are_named(drawn, two):
    assert "zero1: 3 of 3 runs ended at step 3" in visible(drawn["loss_curves"])
    assert "fsdp2: skipped, no curve" in visible(drawn["loss_curves"])
    steps = table.steps(two)
    cut = steps[~((steps["strategy"] == "zero2") & (steps["seed"] == 1) & (steps["step"] > 9))]
    figure = figures.loss_curves(cut, "ddp")
    assert "zero2: 1 of 3 runs ended at step 9, left out" in visible(figure)
    assert "n = 2 to 3 seeds" in figure.caption


def test_part_of_the_runs_without_a_value(two):
    label = two.index[(two["strategy"] == "zero2") & (two["seed"] == 1)][0]
    killed = two.copy()
    killed.loc[label, "status"] = "killed"
    figure = figures.runtime(killed)
    assert "(1 of 3 killed)" in visible(figure)
    assert "zero2: 1 of 3 killed" in figure.caption
    assert "n = 2 to 6 runs" in figure.caption


def test_status_ok_without_a_value_is_not_measured(two):
    unmeasured = two.assign(rank_parts=two["rank_parts"].where(two["strategy"] != "zero2"))
    assert "zero2: not measured" in figures.peak_memory(unmeasured).caption
    # Which says nothing of its memory: what disturbs a run takes its times alone.
    assert "zero2: not measured" in figures.peak_memory(unmeasured.assign(share_of_others=0.5)).caption


def test_world_sizes_name_where_nothing_was_measured(drawn):
    text = visible(drawn["world_sizes"])
    assert "zero1 on 2: out of memory" in text
    assert "fsdp2 on 2: skipped" in text
    assert colours(drawn["world_sizes"], "fsdp2") == 0


# ---------------------------------------------------------------- loss curves


def test_bands_need_seeds(two, drawn):
    one = figures.loss_curves(table.steps(two[two["seed"] == 0]), "ddp")
    assert "band-" not in one.svg
    assert "one seed, so that there is no band" in one.caption
    assert "band-ddp-0" in drawn["loss_curves"].svg
    assert "band-zero2-3" in drawn["loss_curves"].svg
    assert "n = 3 seeds" in drawn["loss_curves"].caption


def test_a_planted_difference_is_the_largest(drawn):
    found = re.search(r"largest difference to ddp at any step is (\S+), by (\w+);", drawn["loss_curves"].alt)
    assert found[2] == "zero3"
    assert float(found[1]) == pytest.approx(0.05, rel=0.2)


def test_identical_curves_say_so(two):
    steps = table.steps(two[two["strategy"].isin(["ddp", "zero2"]) & (two["repeat"] == 0)])
    control = steps[steps["strategy"] == "ddp"]
    same = pd.concat([control, control.assign(strategy="zero2", run_id="same")])
    assert "identical at every step" in visible(figures.loss_curves(same, "ddp"))


def test_differences_far_apart_get_a_logarithmic_axis(two):
    steps = table.steps(two[two["strategy"].isin(["ddp", "zero2"]) & (two["repeat"] == 0)])
    control = steps[steps["strategy"] == "ddp"]
    growing = control.assign(strategy="zero2", run_id="other", loss=control["loss"] + 1e-8 * 1.5 ** control["step"])
    assert "logarithmic, and linear within" in figures.loss_curves(pd.concat([control, growing]), "ddp").caption
    shifted = control.assign(strategy="zero2", run_id="other", loss=control["loss"] + 1e-3)
    assert "logarithmic" not in figures.loss_curves(pd.concat([control, shifted]), "ddp").caption


def test_many_strategies_have_a_panel_per_stage():
    names = [name for name in file.names() if name != "ddp"]
    families = losses._families(in_order(names))
    assert sorted(itertools.chain(*families)) == sorted(names)
    assert [family[0] for family in families] == ["single", "zero1", "zero2", "zero3"]
    assert losses._families(["zero2", "zero3"]) == [["zero2", "zero3"]]


def test_long_curves_are_thinned():
    kept = losses._thinned(5000)
    assert len(kept) <= losses.DRAWN_POINTS + 1
    assert (kept[0], kept[-1]) == (0, 4999)
    assert list(losses._thinned(3)) == [0, 1, 2]


# ---------------------------------------------------------------- memory


def rank(**parts: int | None) -> dict[str, int | None]:
    known = {"parameters": 2**30, "gradients": 2**30, "optimizer_states": 2**31, "communication_buffers": 2**29}
    resting = {**known, "gradients": 0, "host": parts.get("host", 0)}
    return {**known, "resting": resting, "peak": 6 * 2**30, "reserved": 7 * 2**30, "host": 0, **parts}


def test_on_top_of_what_rests_comes_the_rest():
    """Gradients as the optimizer steps are no part of a peak that was in backward."""
    (bar,) = memory._bars([rank()], on_gpu=True)
    assert bar["at_peak"]["rest"] == 6 * 2**30 - 3 * 2**30 - 2**29
    assert bar["at_peak"]["gradients"] == 0
    (bar,) = memory._bars([rank(host=2**31)], on_gpu=True)  # what is on the host is not in the GPU's peak
    assert bar["at_peak"]["rest"] == 6 * 2**30 - 2**30 - 2**29
    assert bar["at_peak"]["on_gpu"] == 2**30
    (bar,) = memory._bars([rank(reserved=None, host=None)], on_gpu=False)
    assert bar["at_peak"]["rest"] == 6 * 2**30 - 3 * 2**30 - 2**29


def test_a_peaks_parts_are_theorys_and_said_to_be(two):
    drawn = figures.peak_memory(two)
    assert "hatched: by theory" in visible(drawn)
    assert "no measurement" in drawn.caption
    unknown = figures.peak_memory(two.assign(predicted_parts=None))
    assert "by theory" not in visible(unknown)


def test_of_many_ranks_the_most_and_the_least():
    bars = memory._bars([rank(peak=peak * 2**30) for peak in (6, 9, 5, 7)], on_gpu=True)
    assert [bar["peak"] // 2**30 for bar in bars] == [9, 5]


def test_offloaded_states_are_told_apart(two):
    offloaded = two["strategy"] == "zero3_cpu_offload"
    parts = [[rank(host=2**31)] * 2 if o else [rank()] * 2 for o in offloaded]
    figure = figures.peak_memory(two.assign(rank_parts=parts, paper_state_bytes=4 * 2**30))
    assert "+ 2 GiB host" in visible(figure)
    assert visible(figure).count("states left on the GPU") == 1
    assert "offloaded, on the host" in figure.caption


@pytest.mark.parametrize(("gib", "words"), [(8, "card: 8 GiB"), (80, "; the card has 80 GiB")])
def test_the_cards_limit_is_a_line_or_a_text(two, gib, words):
    parts = [[rank()] * 2] * len(two)
    figure = figures.peak_memory(two.assign(rank_parts=parts, device_memory_bytes=gib * 2**30))
    assert words in visible(figure)
    assert f"The card has {gib} GiB." in figure.alt


# ---------------------------------------------------------------- speed


def test_runtime_tells_the_extremes(two, drawn):
    medians = two[two["status"] == "ok"].groupby("strategy")["seconds_per_step"].median()
    unit = seconds_unit(medians.max())
    for name in (medians.idxmin(), medians.idxmax()):
        assert f"{unit.text(medians[name])} ({name})" in drawn["runtime"].alt


def test_the_axis_of_runtime_says_where_it_starts(two):
    near = two[two["strategy"].isin(["ddp", "zero2"])]
    assert re.search(r"\(axis from [\d.]+ m?s\)", visible(figures.runtime(near)))
    far = near.assign(seconds_per_step=near["seconds_per_step"].where(near["strategy"] == "ddp", 50.0))
    assert "(axis logarithmic)" in visible(figures.runtime(far))


def test_no_point_covers_another_of_as_many_processes():
    strategies = ["single", "ddp", *(f"zero{i}" for i in range(4)), *(f"own{i}" for i in range(9))]
    runs = pd.DataFrame([(s, size) for s in strategies for size in (2, 4)], columns=["strategy", "world_size"])
    by_size = pd.DataFrame([worlds._places(runs, s) for s in strategies])
    for room, size in enumerate((2, 4)):  # a point is 0.03 wide where there are three rooms
        assert (by_size[size].sort_values().diff().dropna() > 0.035).all()
        assert (by_size[size] - room).abs().max() < 0.4  # nearer to its own number of processes than to another


@pytest.mark.parametrize("outlier", [1.0, 500.0])
def test_no_error_bar_is_beyond_the_axis(outlier):
    ax = Canvas().subplots()
    bounds = pd.Series([-0.4, 0.3, -0.2, 0.1, outlier, -outlier])
    forest._scale(ax, bounds, 0.5)
    low, high = ax.get_xlim()
    assert low < bounds.min()
    assert bounds.max() < high


def test_shared_cores_are_told(everything):
    shared = everything.assign(oversubscribed=everything["world_size"] == 4)
    figure = figures.world_sizes(shared)
    assert "4 processes shared cores or GPUs" in figure.caption
    assert "cores or GPUs shared" in visible(figure)
    assert "Scaling efficiency on 2" in figure.caption
    four = shared[shared["world_size"] == 4]
    assert "say nothing of the strategies" in figures.runtime(four).caption
    assert "say nothing of the strategies" in figures.pareto(four).caption


def test_scaling_efficiency_is_of_the_most_processes(everything, drawn):
    ok = everything[everything["status"] == "ok"]
    rate = ok.groupby(["strategy", "world_size"])["tokens_per_second_per_gpu"].median()
    share = rate["ddp", 4] / rate["single", 1]
    assert f"on 4, speed per process over that of single on 1 process: ddp {share:.0%}" in drawn["world_sizes"].caption


def test_the_front_is_what_no_other_beats():
    seconds = pd.Series({"fast": 1.0, "worse": 2.0, "small": 3.0, "tied": 3.0, "slow": 4.0})
    size = pd.Series({"fast": 9.0, "worse": 9.0, "small": 2.0, "tied": 3.0, "slow": 2.0})
    assert front._front(seconds, size) == ["fast", "small"]


def test_labels_of_the_front_do_not_cover_one_another():
    names = in_order(file.names())
    points = {name: (1.0 + 0.004 * i, 5.0 + 0.01 * (i % 3)) for i, name in enumerate(names)}
    points |= {"single": (2.0, 1.0), "zero3_nvme_offload": (1.5, 9.0)}
    with drawing.house_style("labels"):
        canvas, (ax,) = drawing.panels([4.4])
        for x, y in points.values():
            ax.plot(x, y, marker="o")
        canvas.draw_without_rendering()
        front._label(ax, points, [], {"single"})
        boxes = {text.get_text(): text.get_window_extent() for text in ax.texts if text.get_text()}
    assert set(boxes) == set(names)
    for one, other in itertools.combinations(boxes, 2):
        assert Bbox.intersection(boxes[one], boxes[other]) is None, (one, other)


# ---------------------------------------------------------------- differences


def test_forest_shows_every_verdict(compared, drawn):
    rows = compared[compared["metric"] == "seconds_per_step"]
    text = visible(drawn["differences"]).splitlines()
    said = [{"higher": "slower", "lower": "faster"}.get(verdict, verdict) for verdict in rows["verdict"]]  # of times
    assert sorted(line for line in text if line in said) == sorted(said)
    assert "zero3_cpu_offload" in text
    assert "Slower: single, zero3, zero3_cpu_offload" in drawn["differences"].alt
    assert "95 % interval" in drawn["differences"].caption
    assert "margin: " in "".join(text)


def test_forest_without_interval_is_hollow(compared):
    figure = figures.differences(compared[compared["metric"] == "model_state_bytes"])
    assert "no strategy has an interval" in figure.caption
    assert "margin" not in visible(figure)


def test_forest_names_what_could_not_be_compared(compared):
    rows = compared[compared["metric"] == "seconds_per_step"].copy()
    unknown = ["relative_difference", "relative_low", "relative_high", "difference", "low", "high"]
    rows.loc[rows["strategy"] == "zero2", unknown] = None
    rows.loc[rows["strategy"] == "zero2", "why"] = "not measured on both sides"
    figure = figures.differences(rows)
    assert colours(figure, "zero2") == 0
    assert "not measured on both sides" in visible(figure)
    assert "Without a value: zero2 (not measured on both sides)." in figure.caption


def test_forest_says_when_the_margin_is_too_wide(compared):
    rows = compared[compared["metric"] == "seconds_per_step"]
    assert "within which there is no difference" in figures.differences(rows.assign(relative_margin=0.015)).caption
    assert "above 2 % it says nothing" in figures.differences(rows.assign(relative_margin=0.03)).caption


def test_forest_names_the_controls_processes_where_they_differ(compared):
    rows = compared[compared["metric"] == "final_loss"]
    assert "ddp on 2" not in visible(figures.differences(rows))  # `single` is one process, as the caption says
    other = rows.assign(control_world_size=rows["control_world_size"].where(rows["strategy"] != "zero2", 4))
    assert "zero2 (ddp on 4)" in visible(figures.differences(other))


def test_forest_of_several_world_sizes_has_a_row_for_each(everything):
    rows = differences.compare(everything, metrics=["seconds_per_step"])
    text = visible(figures.differences(rows)).splitlines()
    assert {"zero3 on 2", "zero3 on 4"} <= set(text)


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


def test_order_is_from_nothing_sharded_to_everything_offloaded():
    assert in_order(["mine", "zero3_tuned", "zero1", "zero3", "ddp", "zero3_mine", "single", "ddp"]) == [
        "single", "ddp", "zero1", "zero3", "zero3_tuned", "zero3_mine", "mine",
    ]  # fmt: skip


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


def test_figures_need_no_pyplot():
    for path in Path(drawing.__file__).parent.glob("*.py"):
        assert "pyplot" not in path.read_text()
