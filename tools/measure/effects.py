"""Measure how far the weights move, relative to a right training, with each fault of DeepSpeed that conformance found.

    python tools/measure/effects.py              # all faults; writes reports/conformance/effects/effects.json
    python tools/measure/effects.py autocast-norm fp16-stage-0

Conformance trains with an AdamW whose epsilon is 0.1, which shows every wrong scale of gradients. This program trains
the same cells for 20 steps with the defaults of PyTorch's AdamW and with SGD as well, and a larger model with AdamW.
For comparison, each cell is also trained with an engine and a release that are right.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_study import files
from zero_study.conformance import adapters, cells, judge, matrix, probe, reference, releases, results, toy
from zero_study.conformance.cells import ADAMW, Cell

RECORD = results.PLACE / "effects" / "effects.json"
STEPS = (1, 2, 5, 20)
RIGHT = "0.19.8"  # the release in which other engines train the same cells rightly
MAX_NORM = 1.0  # what most programs clip at
MODELS = {"small": (toy.WIDTH, toy.HIDDEN), "large": (toy.LARGE_WIDTH, toy.LARGE_HIDDEN)}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": ADAMW, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "sgd": {"optimizer": "sgd", "lr": 0.1, "momentum": toy.MOMENTUM, "weight_decay": 0.0},
    "conformance": {
        "optimizer": ADAMW, "lr": toy.LEARNING_RATE, "betas": toy.BETAS, "eps": toy.EPSILON,
        "weight_decay": toy.WEIGHT_DECAY,
    },
}  # fmt: skip
SETTINGS = {name: {**setting, "model": "small"} for name, setting in SETTINGS.items()}
SETTINGS["adamw_large"] = {**SETTINGS["adamw"], "model": "large"}


class Case(NamedTuple):
    """A fault, with a release that has it and a cell that shows it."""

    who: str  # for a table: the trainings that it affects
    release: str
    cell: Cell


CASES = {
    "autocast-fp16-clipping": Case(
        "`torch_autocast` in float16 at stages 1 to 3, with clipping",
        "0.19.8",
        Cell("zero2", "autocast_fp16", 2, 1, True),
    ),
    "fp16-stage-0": Case(
        "fp16 at stage 0",
        "0.19.8",
        Cell("zero0", "fp16", 2, 1, False),
    ),
    "fp16-growing-scale": Case(
        "fp16 at stages 1 to 3, if the loss scale doubles in every third step (by default, in every thousandth)",
        "0.19.8",
        Cell("zero2", "fp16", 2, 1, False, "scale_grows"),
    ),
    "two-backward": Case(
        "two backward passes of one forward pass, at stages 1 and 2",
        "0.19.8",
        Cell("zero2", "fp32", 2, 1, False, "two_backward"),
    ),
    "zero0-bf16-step": Case(
        "bf16 at stage 0, since 0.18.6",
        "0.19.8",
        Cell("zero0", "bf16", 2, 1, False),
    ),
    "zero1-offload-fp32-sum": Case(
        "stage 1 with CPU offload, bf16 accumulated in fp32",
        "0.19.3",
        Cell("zero1_cpu_offload", "bf16_fp32_sum", 2, 1, False),
    ),
    "outputs-of-outputs": Case(
        "two micro batches, and a model that returns two outputs of which one is computed from the other",
        "0.19.3",
        Cell("zero2", "fp32", 2, 2, False),
    ),
    "part-outside": Case(
        "two micro batches, and a submodule that the script also calls directly",
        "0.19.3",
        Cell("zero3", "fp32", 2, 2, False, "part_outside"),
    ),
    "zero1-fp32-sum-gradients": Case(
        "stage 1, bf16 accumulated in fp32, 0.18.5 to 0.18.9",
        "0.18.6",
        Cell("zero1", "bf16_fp32_sum", 2, 1, False),
    ),
    "zero0-bf16-still": Case(
        "bf16 at stage 0, 0.18.3 to 0.18.5",
        "0.18.3",
        Cell("zero0", "bf16", 2, 1, False),
    ),
    "zero1-fp32-sum-still": Case(
        "stage 1, bf16 accumulated in fp32, 0.18.3 to 0.18.4",
        "0.18.3",
        Cell("zero1", "bf16_fp32_sum", 2, 1, False),
    ),
    "zero0-bf16-norm": Case(
        "bf16 at stage 0, 0.17.6 to 0.18.2",
        "0.18.0",
        Cell("zero0", "bf16", 2, 1, False),
    ),
    "zero1-fp32-sum-step": Case(
        "stage 1, bf16 accumulated in fp32, 0.17.6 to 0.18.2",
        "0.18.0",
        Cell("zero1", "bf16_fp32_sum", 2, 1, False),
    ),
    "zero2-accumulation": Case(
        "stage 2, two micro batches, 0.17.6 to 0.18.2",
        "0.18.0",
        Cell("zero2", "fp32", 2, 2, False),
    ),
    "autocast-norm": Case(
        "`torch_autocast` in bfloat16 at stages 1 and 2, with clipping, 0.17.2 to 0.17.5",
        "0.17.5",
        Cell("zero2", "autocast", 2, 1, True),
    ),
}  # fmt: skip


def control(cell: Cell) -> Cell:
    """Return the same cell with an engine that is right in the release RIGHT."""
    is_right_at_0 = cell.precision in ("fp32", "autocast", "autocast_fp16")
    return dataclasses.replace(cell, engine="zero0" if is_right_at_0 else "zero3")


def main(names: Sequence[str]) -> None:
    chosen = {name: CASES[name] for name in names or CASES}
    trainings: dict[str, set[Cell]] = {}
    for case in chosen.values():
        trainings.setdefault(case.release, set()).add(case.cell)
        if case.cell.variation != "scale_grows":  # wrong at every stage
            trainings.setdefault(RIGHT, set()).add(control(case.cell))
    moved = {
        (release, setting): _moved(release, sorted(together, key=lambda cell: cell.name), setting)
        for release, together in sorted(trainings.items(), reverse=True)
        for setting in SETTINGS
    }
    content: dict[str, Any] = {
        "versions": {key: value for key, value in matrix.installed().items() if key != "deepspeed"},
        "examined_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": {
            name: {**setting, "parameters": _num_parameters(setting)} for name, setting in SETTINGS.items()
        },
        "faults": files.load(RECORD, "a record of effects")["faults"] if names and RECORD.exists() else {},
    }  # fmt: skip
    for name, case in chosen.items():
        content["faults"][name] = {"who": case.who, "release": case.release, "cell": case.cell.name} | {
            setting: {
                "moved": moved[case.release, setting][case.cell],
                "right_engine": moved.get((RIGHT, setting), {}).get(control(case.cell)),
            }
            for setting in SETTINGS
        }
    files.write_json(RECORD, content)


def _num_parameters(setting: Mapping[str, Any]) -> int:
    _apply(setting)
    return sum(parameter.numel() for parameter in toy.Toy(Cell("ddp", "fp32", 2, 1, False)).parameters())


def _apply(setting: Mapping[str, Any]) -> None:
    """Set what conformance trains with in this process: optimizer, model and number of steps."""
    toy.RATE_OF[setting["optimizer"]], toy.WEIGHT_DECAY = setting["lr"], setting["weight_decay"]
    if setting["optimizer"] == ADAMW:
        toy.BETAS, toy.EPSILON = setting["betas"], setting["eps"]
    toy.WIDTH, toy.HIDDEN = MODELS[setting["model"]]
    cells.MAX_NORM = MAX_NORM
    reference.NUM_DRAWS = 0  # bounds are not needed
    for module in (adapters, judge, probe, reference):
        setattr(module, "NUM_STEPS", max(STEPS))  # noqa: B010


def _moved(release: str, together: Sequence[Cell], name: str) -> dict[Cell, dict[str, float | None] | str]:
    """Train cells with a release, and return how far the weights moved after each of STEPS, or the error."""
    setting = SETTINGS[name]
    _apply(setting)
    trained = [dataclasses.replace(cell, optimizer=setting["optimizer"]) for cell in together]
    needs = {extension for cell in trained for extension in cell.extensions}
    environment = releases.environment({"deepspeed": release}, needs, releases.FOLDER / "effects")
    environment |= {
        "EFFECTS_SETTING": name,
        "PYTHONPATH": os.pathsep.join((environment["PYTHONPATH"], str(Path(__file__).parent))),
    }
    outcomes: dict[Cell, dict[str, float | None] | str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        print(f"DeepSpeed {release}, {name}:", flush=True)
        failures = matrix.launch_cells(trained, Path(scratch), environment=environment, module="effects")
        for number, (cell, as_trained) in enumerate(zip(together, trained, strict=True)):
            if as_trained in failures:
                outcomes[cell] = failures[as_trained].message[: matrix.MESSAGE_LENGTH]
            else:
                trace = torch.load(matrix.traces(Path(scratch), number, cell.num_ranks)[0], weights_only=True)
                expected = reference.expect(as_trained.reference_key)
                scales = judge.update_scale(expected, trace)
                outcomes[cell] = {str(step): scales[step - 1] for step in STEPS}
            print(f"  {as_trained.name}: {outcomes[cell]}", flush=True)
    return outcomes


def _train(folder: Path) -> None:
    """Be the launched process, which trains with the settings of this program.

    In fp16, the first loss scale is the default of DeepSpeed, because the effect of one fault depends on it.
    """
    _apply(SETTINGS[os.environ["EFFECTS_SETTING"]])
    of_conformance = adapters.config

    def config(cell: Cell, scratch: Path) -> dict[str, Any]:
        settings = of_conformance(cell, scratch)
        if "fp16" in settings and not cell.does("scale_grows"):
            del settings["fp16"]["initial_scale_power"]
        return settings

    adapters.config = config
    probe.main(folder)


if __name__ == "__main__":
    if "EFFECTS_SETTING" in os.environ:
        _train(Path(sys.argv[1]))
    else:
        main(sys.argv[1:])
