"""README's picture: what others measured on A100 and H100, from the public runs in reports/public.

Each of its three panels compares two ways to train, and says who measured it and what else differs. It is drawn wide
for desktops and tall for phones. Sizes and places are in pixels, from the upper left corner.

python tools/derive/measured_on_gpus.py    # draws both, once for light and once for dark pages
"""

from __future__ import annotations

import io
import re
import statistics
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.compare import public_cards, public_comparisons
from study.report import public_answers
from zero_study.files import ROOT
from zero_study.public_runs.quantities import points
from zero_study.terminal import percent

# By ground: the paper, text, less important text and lines, and one color per kind of run. Text on the paper has a
# contrast of at least 4.5, and color-blind readers can distinguish colors of one panel.
COLORS = {
    "light": {"paper": "#ffffff", "ink": "#1f2328", "muted": "#59636e", "line": "#d1d9e0", "one": "#bc4c00",
              "eight": "#0969da", "sharded": "#1a7f37", "other": "#818b98", "pair": "#8250df"},
    "dark": {"paper": "#0d1117", "ink": "#f0f6fc", "muted": "#9198a1", "line": "#3d444d", "one": "#f0883e",
             "eight": "#58a6ff", "sharded": "#3fb950", "other": "#7d8590", "pair": "#ab7df8"},
}  # fmt: skip
TITLE, MAKER = "Measured by others on A100 and H100 GPUs", "Public logs and tables, compared by zero-study"
SIZES = {"wide": (1000, 440), "tall": (336, 1300)}
MARGIN, GAP, TOP = 14, 26, {"wide": 54, "tall": 96}
PANEL = (308, 408)  # width and height
LARGE, HEADING, TEXT = 17.0, 15.0, 12.0  # letters
METADATA = {"Date": None, "Creator": None}  # so that equal inputs make equal bytes
LETTERS = 48  # of a line of text in a panel


def style(colors: dict[str, str]) -> dict[str, Any]:
    """Return the settings of matplotlib for one ground: letters, and axes with thin lines and without a frame."""
    values = {
        colors["ink"]: ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"),
        colors["line"]: ("grid.color", "axes.edgecolor"),
        colors["paper"]: ("figure.facecolor",),
        "none": ("axes.facecolor",),
        TEXT: ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"),
        0.6: ("grid.linewidth",),
        0: ("axes.spines.top", "axes.spines.right", "axes.spines.left", "xtick.major.size", "ytick.major.size"),
        1: ("axes.grid", "axes.axisbelow", "grid.alpha"),
    }
    return {name: value for value, names in values.items() for name in names}


class Sheet:
    """A figure with the colors of one ground, on which everything is placed in pixels."""

    def __init__(self, kind: str, ground: str) -> None:
        self.width, self.height = SIZES[kind]
        self.colors = COLORS[ground]
        self.figure = plt.figure(figsize=(self.width / 72, self.height / 72))

    def text(self, x: float, y: float, lines: list[str], size: float = TEXT, color: str = "ink", **look: Any) -> None:
        """Write lines of text. The place is the left end of the first baseline."""
        for number, line in enumerate(lines):
            place = (x / self.width, 1 - (y + number * 1.28 * size) / self.height)
            self.figure.text(*place, line, fontsize=size, color=self.colors[color], **look)

    def label(self, axes: Axes, x: float, y: float, text: str, color: str = "ink", **look: Any) -> None:
        """Write text over the lines of axes, at a place in their units."""
        box = {"facecolor": self.colors["paper"], "linewidth": 0, "pad": 1}
        axes.text(x, y, text, color=self.colors[color], bbox=box, **look)

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Add axes. The place is that of the upper left corner."""
        place = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(place)


class Panel(NamedTuple):
    """One comparison: its result, who measured it, what else differs, its numbers in words, and how it is drawn."""

    heading: str
    source: str
    note: str
    numbers: str
    draw: Callable[[Sheet, float, float], None]  # with the place of the drawing


def one_and_eight() -> Panel:
    """Compare modded-nanogpt on one and on eight H100: loss, time and memory."""
    result = public_answers.result(public_answers.MORE_GPUS)
    loss, seconds, peak = (
        public_answers.difference(public_answers.MORE_GPUS, quantity)
        for quantity in ("last evaluation loss", "seconds in all", "peak of tensors")
    )
    assert loss.verdict == "equivalent"
    assert loss.low is not None
    assert loss.high is not None
    apart = max(-loss.low, loss.high)
    assert len(loss.control) == len(loss.arm)
    pattern = re.compile(r"version of (\w+): ([\d.]+)\S* \([^)]*\) and ([\d.]+)\S* \([^)]*\)")
    releases = [pattern.sub(r"\1 \2 and \3", fact) for fact in result.also_differs]
    sides, ends = [], []
    for name, side in (("1 H100", "control"), ("8 H100", "arm")):
        minutes, final, size = (statistics.fmean(getattr(each, side)) for each in (seconds, loss, peak))
        ends.append((minutes / 60, final))
        sides.append(f"{name}: {minutes / 60:.1f} minutes,\nloss {final:.3f}, {size / 2**30:.1f} GiB")

    def draw(sheet: Sheet, x: float, y: float) -> None:
        sheet.text(x, y, ["loss on held-out text"])
        axes = sheet.axes(x + 26, y + 10, PANEL[0] - 26, 160)
        groups = public_comparisons.groups(result.comparison).values()
        places = ((4.2, 4.45), (1.75, 3.25))
        for runs, color, end, label, place in zip(groups, ("one", "eight"), ends, sides, places, strict=True):
            for run in runs:
                curve = [(s / 60, value) for s, value in points(run.evaluation, "seconds", "evaluation_loss") if s]
                axes.plot(*zip(*curve, strict=True), color=sheet.colors[color], linewidth=1.2, alpha=0.5)
            axes.plot(*end, "o", color=sheet.colors[color], markersize=7)
            sheet.label(axes, *place, label, color, va="top", weight="bold")
        axes.set(xlim=(0, 10.3), ylim=(2.75, 4.65), xticks=range(0, 11, 2), yticks=(3, 3.5, 4, 4.5))
        axes.set_xlabel("minutes of training")

    times = [minutes for minutes, _ in ends]
    return Panel(
        f"8 H100 instead of 1: same loss,\n{times[0] / times[1]:.1f} times as fast",
        f"Authors of modded-nanogpt, a small GPT: {len(loss.arm)} runs each",
        f"Also different: {', '.join(releases)}. 8 GPUs shard most gradients and optimizer states. GiB: peak per "
        f"GPU. Losses: at most {percent(apart)} apart (95 % interval).",
        "; ".join(side.replace("\n", " ") for side in sides),
        draw,
    )


# In Lightning of 2021, 16 bits meant autocast under DDP, with weights in fp32, and weights in fp16 under DeepSpeed.
# FSDP was measured with an unreleased branch of Lightning, so that the type of its weights is unknown.
FSDP = "Fully-Sharded-Training-Wrap"
HATCHED: dict[str, Any] = {"facecolor": "none", "hatch": "////", "linewidth": 1}


def strategies() -> Panel:
    """Compare the strategies of Lightning's developers: memory and time on eight A100."""
    entries = {name: entry for entry, name in public_answers.STRATEGIES.items()} | {"FSDP": FSDP}
    runs = {name: public_answers.of_lightning("1", entry) for name, entry in entries.items()}
    assert {(run.setting.gpu, run.setting.num_gpus, run.setting.parameters) for run in runs.values()} == {
        ("A100", 8, 1_000_000_000)
    }
    peaks = {name: run.totals["peak_allocated_bytes"] / 2**30 for name, run in runs.items()}
    seconds = {name: run.totals["seconds_per_step"] for name, run in runs.items()}

    def draw(sheet: Sheet, x: float, y: float) -> None:
        columns = (peaks, "peak GiB per GPU", ".1f", 84, 84), (seconds, "seconds per step", ".2f", 206, 66)
        for values, head, form, left, width in columns:
            sheet.text(x + left, y, [head])
            axes = sheet.axes(x + left, y + 10, width, 180)
            axes.grid(visible=False)
            for row, (name, value) in enumerate(values.items()):
                is_alike = runs[name].setting.engine == "DeepSpeed"
                look = (
                    {"color": sheet.colors["sharded"]} if is_alike else {"edgecolor": sheet.colors["other"], **HATCHED}
                )
                bar = axes.barh(row, value, height=0.62, **look)
                axes.bar_label(bar, [f"{value:{form}}"], padding=4)
            axes.set(xlim=(0, max(values.values())), ylim=(len(values) - 0.5, -0.5), xticks=[], yticks=[])
            axes.spines["bottom"].set_visible(False)
            if values is peaks:
                axes.set_yticks(range(len(values)), [name.replace(" with ", ",\n") for name in values])

    return Panel(
        f"ZeRO-3 instead of ZeRO-2:\n{peaks['ZeRO-3']:.1f} GiB per GPU instead of {peaks['ZeRO-2']:.1f}",
        "Lightning's developers (2021): minGPT with 1 billion parameters, 8 A100, 1 run each",
        "Hatched: not comparable with the other bars, because the weights are in fp32 (DDP) or in a type that is not "
        "stated (FSDP of FairScale) instead of fp16.",
        "; ".join(f"{name}: {peaks[name]:.1f} GiB, {seconds[name]:.2f} s per step" for name in runs),
        draw,
    )


def cards() -> Panel:
    """Compare A100 with H100 by the pairs of MosaicML, and by the tests of Megatron-LM."""
    pairs, found = public_answers.pairs_of("a100-h100-foundry"), public_answers.spread_of("a100-h100-foundry", "time")
    of_models: dict[str, list[float]] = {}
    for pair in pairs:
        of_models.setdefault(pair.entry.partition(",")[0].upper(), []).append(pair.time or 0)
    names = sorted(of_models, key=lambda name: (name[-1] == "B", int(name[:-1])))
    spread = f"{found.least:.2f} to {found.most:.2f}"
    tests = [row.spread.median for row in public_cards.rows() if row.comparison.source == "megatron"]
    others = f"{min(tests):.2f} to {max(tests):.2f}"

    def draw(sheet: Sheet, x: float, y: float) -> None:
        axes = sheet.axes(x + 70, y + 10, PANEL[0] - 70, 160)
        for row, name in enumerate(names):
            axes.plot(
                of_models[name],
                [row] * len(of_models[name]),
                "o",
                color=sheet.colors["pair"],
                markersize=7,
                alpha=0.65,
                mew=0,
            )
        row = len(names)
        axes.plot(tests, [row] * len(tests), "D", color=sheet.colors["other"], markersize=6, mew=0)
        axes.axvline(found.median, ymin=1 / (row + 1), color=sheet.colors["ink"], linewidth=1.2)
        sheet.label(axes, found.median, -0.65, f"median {found.median:.2f}", ha="center", weight="bold")
        sheet.label(axes, max(tests) + 0.08, row, f"{others} (small tests)", va="center_baseline")
        axes.set(xlim=(1, 2.95), ylim=(row + 0.5, -0.5))
        axes.set_yticks(range(row + 1), [*(f"MPT {name}" for name in names), "Megatron"])
        axes.set_xticks((1, 1.5, 2, 2.5), ["1x", "1.5x", "2x", "2.5x"])
        axes.set_xlabel("step time on A100, relative to H100")

    return Panel(
        f"H100 instead of A100:\n{found.median:.1f} times as fast in the median",
        f"MosaicML: {found.num} pairs of FSDP trainings, 8 GPUs, bf16, 1 run each",
        "Dots: pairs, whose stated settings are equal. Releases are not stated. Diamonds: medians of NVIDIA's tests of "
        "Megatron-LM, by cluster.",
        f"A step takes {found.median:.2f} times as long on A100 ({spread}), and {others} times in small tests",
        draw,
    )


def panels() -> list[Panel]:
    """Return the three comparisons."""
    return [one_and_eight(), strategies(), cards()]


def draw(kind: str, ground: str) -> Figure:
    """Draw the picture, with its panels side by side (wide) or one below the other (tall)."""
    with mpl.rc_context(style(COLORS[ground])):
        sheet, is_tall = Sheet(kind, ground), kind == "tall"
        sheet.text(MARGIN, 28, textwrap.wrap(TITLE, 24 if is_tall else 60), LARGE, weight="bold")
        sheet.text(*((MARGIN, 70) if is_tall else (462, 28)), [MAKER], color="muted")
        for number, panel in enumerate(panels()):
            x = MARGIN if is_tall else MARGIN + number * (PANEL[0] + GAP)
            y = TOP[kind] + (number * PANEL[1] if is_tall else 0)
            sheet.text(x, y + 14, panel.heading.split("\n"), HEADING, weight="bold")
            sheet.text(x, y + 54, _wrapped(panel.source), color="muted")
            panel.draw(sheet, x, y + 98)
            sheet.text(x, y + 322, _wrapped(panel.note), color="muted")
    plt.close(sheet.figure)
    return sheet.figure


def _wrapped(text: str) -> list[str]:
    """Divide a text into lines as wide as a panel. A number stays together with the word after it."""
    return textwrap.wrap(re.sub(r"(?<=\d) (?=[a-zA-Z])", "\N{NO-BREAK SPACE}", text), LETTERS)


def svg(kind: str, ground: str) -> str:
    """Return the picture as SVG, whose letters are paths. What makes it large without being seen is left out."""
    with mpl.rc_context({"svg.hashsalt": "zero-study"}):
        draw(kind, ground).savefig(drawn := io.StringIO(), format="svg", facecolor="auto", metadata=METADATA)
    text = re.sub(r"<!-- .*? -->|^ +|(?<=\d\.\d\d)\d+(?= [\d.]+\))", "", drawn.getvalue(), flags=re.MULTILINE)
    return re.sub(r"\n\n+", "\n", text).replace("DejaVuSans-", "")


def picture() -> str:
    """Return README's picture, with a text that says the same."""
    parts = [
        f"{panel.heading} ({panel.source}): {panel.numbers}. {panel.note}".replace("\n", " ") for panel in panels()
    ]
    media = {
        ("tall", "dark"): "(max-width: 700px) and (prefers-color-scheme: dark)",
        ("tall", "light"): "(max-width: 700px)",
        ("wide", "dark"): "(prefers-color-scheme: dark)",
    }
    sources = [f'  <source media="{when}" srcset="{file(*which)}">' for which, when in media.items()]
    image = f'  <img src="{file("wide", "light")}" alt="{TITLE}. {" ".join(parts)}" width="1000">'
    return "\n".join(["<picture>", *sources, image, "</picture>"])


def file(kind: str, ground: str) -> str:
    """Return the path of a picture, from the root of the repository."""
    return f"reports/measured-on-gpus-{'tall-' if kind == 'tall' else ''}{ground}.svg"


def main() -> None:
    """Write the pictures: wide and tall, for light and dark pages. Equal inputs make equal bytes."""
    for kind in SIZES:
        for ground in COLORS:
            (ROOT / file(kind, ground)).write_text(svg(kind, ground), encoding="utf-8")


if __name__ == "__main__":
    main()
