"""What are the parts of a rank's memory called, and how are they drawn? Measured: filled. Predicted: hatched."""

from __future__ import annotations

from matplotlib.patches import Patch

STATES = {"parameters": "#5558C8", "gradients": "#8C90E8", "optimizer_states": "#B9BCF5"}
COLOURS = {
    **STATES,
    "on_gpu": "#7073D8",
    "communication_buffers": "#C79A2B",
    "rest": "#9A9A9A",
    "gathered_parameters": "#3E9BB5",
    "offloaded": "#B07AA1",
}
NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "on_gpu": "states left on the GPU",
    "communication_buffers": "communication buffers",
    "gathered_parameters": "gathered parameters",
    "offloaded": "offloaded, in the same memory",
    "rest": "activations, temporaries",
    "during": "more during the step",
    "reserved": "reserved beyond allocated",
    "paper": "model states by the paper",
}

# Parts of a predicted peak, by what is drawn of them.
PREDICTED = {
    "parameters": ("parameters",),
    "gathered_parameters": ("gathered_parameters",),
    "gradients": ("gradients",),
    "optimizer_states": ("optimizer_states",),
    "offloaded": ("offloaded",),
    "communication_buffers": ("communication_buffers",),
    "rest": ("activations", "logits", "temporary_buffers"),
}
# Without dots and stars: each of them is a circle of its own in the SVG.
HATCHES = dict(zip(PREDICTED, ("////", "xxxx", "\\\\\\\\", "----", "++++", "||||", "//"), strict=True))


def sizes(parts: dict[str, float]) -> dict[str, float]:
    """Bytes of a predicted peak by the parts that are drawn."""
    return {drawn: sum(parts.get(name, 0) for name in names) for drawn, names in PREDICTED.items()}


def hatched(patch: Patch, part: str) -> Patch:
    """Give a patch the look of a predicted part."""
    patch.set(facecolor="none", edgecolor=COLOURS[part], linewidth=0.9, hatch=HATCHES[part])
    return patch
