"""Draw the pictures of docs/concepts.md as SVG files in docs/drawings.

    python tools/derive/drawings.py

Equal input makes equal bytes. All numbers come from the formulas of the ZeRO paper in `zero_study.theory`.
A drawing is 360 units wide and its smallest text is 13 units high, so text has at least 12 pixels on a screen of 390
pixels. Every drawing lies on a light card with dark text, so it is legible on light and on dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from zero_study.theory.model_states import StateBytes, paper_bytes_per_parameter

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "drawings"
WIDTH = 360
MARGIN = 14
SHOWN_WIDTH = 480  # pixels on a wide screen
NUM_PROCESSES = 4
DEFAULT_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's reduce_bucket_size
SMALL_MODEL_PARAMETERS = 124_000_000
FP32_BYTES = 4

CARD, EDGE, TEXT = "#e9eef4", "#8093a8", "#16202c"
COLORS = {"parameters": "#7db3e8", "gradients": "#f0b35a", "optimizer states": "#83c793"}
LINE = 19  # between lines of text


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", bold: bool = False) -> str:
    """Return one line of text, whose baseline is at y."""
    weight = ' font-weight="bold"' if bold else ""
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{TEXT}"{weight}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, is_dashed: bool = False) -> str:
    """Return a rectangle; a dashed one stands for something that is not there."""
    edge = f'stroke="{EDGE}" stroke-dasharray="4 3"' if is_dashed else f'stroke="{TEXT}" stroke-width="0.75"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" {edge}/>'


def arrow(x: float, y: float, end: float, head: float = 6) -> str:
    """Return a horizontal arrow from x to end."""
    line = f'<line x1="{x:g}" y1="{y:g}" x2="{end - head:g}" y2="{y:g}" stroke="{TEXT}" stroke-width="1.5"/>'
    points = f"{end:g},{y:g} {end - head:g},{y - head / 1.5:g} {end - head:g},{y + head / 1.5:g}"
    return f'{line}<polygon points="{points}" fill="{TEXT}"/>'


def card(height: float, title: str, parts: list[str]) -> str:
    """Return a whole drawing: its parts on a light card, under its title."""
    shown_height = round(height * SHOWN_WIDTH / WIDTH)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{SHOWN_WIDTH}" '
        f'height="{shown_height}" role="img" font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif">'
    )
    ground = f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="{CARD}"/>'
    heading = text(MARGIN, 26, title, size=16, bold=True)
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, heading, *parts, "</svg>", ""])


def legend(y: float) -> list[str]:
    """Return the colors of the three model states."""
    parts, x = [], float(MARGIN)
    for name, color in COLORS.items():
        parts += [box(x, y - 11, 12, 12, color), text(x + 17, y, name)]
        x += 17 + 7.2 * len(name) + 12
    return parts


def model_states(title: str, stage: int, steps: list[str], layers: bool = False) -> str:
    """Draw what each of four processes keeps of the model states in fp32, and say what a step does."""
    whole = paper_bytes_per_parameter(0, NUM_PROCESSES, "fp32")
    kept = paper_bytes_per_parameter(stage, NUM_PROCESSES, "fp32")
    left, height = 66.0, 24.0
    scale = (WIDTH - MARGIN - left) / whole.total
    parts, y = legend(50), 66.0
    for rank in range(NUM_PROCESSES):
        parts.append(text(MARGIN, y + 17, f"rank {rank}"))
        x = left
        for color, all_bytes, kept_bytes in zip(COLORS.values(), _numbers(whole), _numbers(kept), strict=True):
            if kept_bytes < all_bytes:
                parts.append(box(x, y, all_bytes * scale, height, "none", is_dashed=True))
            start = x + rank * kept_bytes * scale if kept_bytes < all_bytes else x
            parts.append(box(start, y, kept_bytes * scale, height, color))
            x += all_bytes * scale
        y += height + 7
    sum_of_parts = " + ".join(f"{number:g}" for number in _numbers(kept))
    y += 14
    parts.append(text(MARGIN, y, f"{kept.total:g} bytes per parameter", bold=True))
    parts.append(text(WIDTH - MARGIN, y, f"({sum_of_parts})", anchor="end"))
    for line in steps:
        y += LINE
        parts.append(text(MARGIN, y, line))
    if layers:
        parts += _layers(y + 12)
        y += 12 + 46
    return card(y + 14, title, parts)


def _numbers(states: StateBytes) -> tuple[float, float, float]:
    return states.parameters, states.gradients, states.optimizer_states


def _layers(y: float) -> list[str]:
    """Draw the parameters of four layers in one process while the second layer computes."""
    width, height, gap = 78.0, 22.0, 6.67
    parts = []
    for at in range(4):
        x = MARGIN + at * (width + gap)
        parts.append(box(x, y, width, height, "none", is_dashed=True))
        parts.append(box(x, y, width if at == 1 else width / NUM_PROCESSES, height, COLORS["parameters"]))
        label = "computes" if at == 1 else f"layer {at + 1}"
        parts.append(text(x + width / 2, y + height + 17, label, anchor="middle", bold=at == 1))
    return parts


def offload() -> str:
    """Draw where the model states are under three ways to offload them."""
    states = list(COLORS)
    columns = [
        (("ZeRO-2", "to CPU"), (["parameters"], ["gradients", "optimizer states"], [])),
        (("ZeRO-3", "to CPU"), (["layer in use"], states, [])),
        (("ZeRO-3", "to NVMe"), (["layer in use"], ["buffers"], states)),
    ]
    left, width, block, gap = 58.0, 94.0, 24.0, 4.0
    parts, top = [], 66.0
    for at, (heads, _) in enumerate(columns):
        middle = left + (width + 3) * at + width / 2
        parts += [text(middle, 46 + 16 * line, head, anchor="middle", bold=True) for line, head in enumerate(heads)]
    top += 4
    for place, label in enumerate(("GPU", "Host", "Disk")):
        height = (1 if place == 0 else 3) * (block + gap) + gap
        parts.append(text(MARGIN, top + height / 2 + 5, label, bold=True))
        for at, (_, places) in enumerate(columns):
            x = left + (width + 3) * at
            parts.append(box(x, top, width, height, "#ffffff"))
            for row, name in enumerate(places[place]):
                y = top + gap + row * (block + gap)
                parts.append(box(x + gap, y, width - 2 * gap, block, COLORS.get(name, CARD)))
                parts.append(text(x + width / 2, y + 17, name.removesuffix(" states"), anchor="middle"))
        top += height + 6
    y = top + 12
    parts.append(text(MARGIN, y, "The GPU computes the gradients of a layer, and"))
    parts.append(text(MARGIN, y + LINE, "then they are moved. The CPU runs the optimizer."))
    return card(y + LINE + 14, "Offload to host memory or to a disk", parts)


def buckets() -> str:
    """Draw a bucket that fills with gradients, and compare the default bucket with a small model's gradients."""
    parts, y = (
        [text(MARGIN, 48, "Gradients are copied into a bucket."), text(MARGIN, 65, "A full bucket is sent.")],
        80.0,
    )
    x, height = float(MARGIN), 26.0
    for width in (34, 12, 46, 20):
        parts.append(box(x, y, width, height, COLORS["gradients"]))
        x += width + 3
    parts.append(arrow(x + 2, y + height / 2, x + 24))
    x += 28
    parts.append(box(x, y - 4, 116, height + 8, "#ffffff"))
    inside = x + 4
    for width in (34, 12, 46):
        parts.append(box(inside, y, width, height, COLORS["gradients"]))
        inside += width + 1
    parts.append(arrow(x + 120, y + height / 2, x + 142))
    parts.append(text(WIDTH - MARGIN, y + 17, "send", anchor="end"))
    y += height + 32
    model_gb = SMALL_MODEL_PARAMETERS * FP32_BYTES / 1e9
    bucket_gb = DEFAULT_BUCKET_ELEMENTS * FP32_BYTES / 1e9
    scale = (WIDTH - 2 * MARGIN) / bucket_gb
    parts.append(text(MARGIN, y, "All fp32 gradients of a model with"))
    parts.append(text(MARGIN, y + 17, f"{SMALL_MODEL_PARAMETERS // 10**6} million parameters: {model_gb:.1f} GB"))
    parts.append(box(MARGIN, y + 25, model_gb * scale, height, COLORS["gradients"]))
    y += 25 + height + 24
    parts.append(text(MARGIN, y, f"DeepSpeed's default bucket in fp32: {bucket_gb:.1f} GB"))
    parts.append(box(MARGIN, y + 8, bucket_gb * scale, height, "#ffffff"))
    return card(y + 8 + height + 14, "Buckets", parts)


def drawings() -> dict[str, str]:
    """Return every drawing by the name of its file."""
    return {
        "ddp.svg": model_states("DDP: nothing is sharded", 0, ["In each step, all processes average their gradients."]),
        "zero1.svg": model_states(
            "ZeRO-1 shards optimizer states",
            1,
            ["Each process updates one part of the parameters.", "Then all processes gather the updated parts."],
        ),
        "zero2.svg": model_states(
            "ZeRO-2 shards gradients, too",
            2,
            ["Each averaged gradient is kept only by the", "process that updates these parameters."],
        ),
        "zero3.svg": model_states(
            "ZeRO-3, FSDP2 shard parameters",
            3,
            ["A layer's parameters are gathered before it", "computes and are freed afterwards:"],
            layers=True,
        ),
        "offload.svg": offload(),
        "buckets.svg": buckets(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in drawings().items():
        (FOLDER / name).write_text(drawing, encoding="utf-8")
