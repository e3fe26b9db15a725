"""The plan of the first hour on rented GPUs: which runs, in which order, and what each of them is predicted to show.

reports/first-hour.md has the plan, which tools/derive/docs_tables.py writes, and names the commands that print the
predictions. The files in docs/clouds/ rent machines and run the same plan; this program writes the commands and the
prices into them, and the predictions into reports/predicted/first_hour.json. Nothing here is measured.

    python tools/derive/first_hour.py            # print the tables
    python tools/derive/first_hour.py --write    # write the files
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from measuring import one_gpu

from study.running import predictions, studies
from study.running.estimate import History
from study.running.predictions import PredictedRun
from zero_study import files, terminal
from zero_study.engines import this_machine
from zero_study.errors import Refusal
from zero_study.theory import hardware, intervals
from zero_study.theory.gpus import Gpu

CLOUDS = files.ROOT / "docs" / "clouds"
PREDICTIONS = files.ROOT / "reports" / "predicted" / "first_hour.json"
IDLE_MINUTES = 10  # after which SkyPilot gives a machine back, as the files in docs/clouds/ ask it to
ALONE = ("a100-40gb", "a100-80gb", "h100-sxm")  # machines with one GPU
SEVERAL = ("h100-sxm", (2, 8))  # machines with several GPUs, whose runs are predicted
OF_ONE_GPU = ("gpu-bert-large", "gpu-gpt2-xl", "gpu-lora")
OF_SEVERAL_GPUS = ("multi-gpu", "multi-gpu-lora")
# The studies on several GPUs in their order, each with a part of the ids of the runs that use all GPUs. FILLING repeats
# each run, round by round, and gets the time that the others leave.
STUDIES = {"gpu-acceptance": "", "multi-gpu": "-{}x-", "multi-gpu-lora": "-{}x-"}
FILLING = "multi-gpu"


class Machine(NamedTuple):
    """A machine that can be rented, with the file in docs/clouds/ that rents it, if there is one."""

    gpu: str
    num_gpus: int
    file: str | None = None
    priced_as: str | None = None  # the GPU whose price it has, if machines with one GPU have another kind of it
    num_nodes: int = 1

    @property
    def name(self) -> str:
        return f"{f'{self.num_nodes} x ' if self.num_nodes > 1 else ''}{self.num_gpus} {self.gpu}"

    @property
    def dollars_per_hour(self) -> float:
        price = self._priced.price_per_hour
        assert price is not None
        return price * self.num_gpus * self.num_nodes

    @property
    def price_source(self) -> str:
        return f"{self._priced.price_source}, {self._priced.price_date}"

    @property
    def _priced(self) -> Gpu:
        return hardware.find_gpu(self.priced_as or self.gpu)


PLANNED = (Machine("h100-sxm", 2), Machine("h100-sxm", 8, "8xh100.yaml"), Machine("a100-80gb", 8, "8xa100.yaml"))
MACHINES = (
    Machine("a100-40gb", 1),
    Machine("a100-80gb", 1, "a100.yaml", "a100-pcie-80gb"),
    Machine("h100-sxm", 1),
    *PLANNED,
    Machine("h100-sxm", 8, "2x8xh100.yaml", num_nodes=2),
)
# Two strategies of one block are in order if the larger predicted peak is larger than the other by more than this.
APART = 0.05


def memory_error() -> float:
    """Return the relative error that decides the limits of a predicted peak.

    It is the largest 90th percentile of the errors of published peaks, over the classes of engines that have at least
    three of them.
    """
    entries = intervals.CROSS_VALIDATION["memory"]
    peaks = [entry for entry in entries if entry["quantity"] == "peak_allocated_bytes" and entry["count"] >= 3]
    return max(float(entry["percentile_90"]) for entry in peaks)


class Limits(NamedTuple):
    """The bytes between which a measured peak of tensors is expected."""

    low: float
    high: float


def limits(predicted: PredictedRun) -> Limits:
    """Return the limits of a peak. A measured peak outside them refutes the prediction."""
    error = memory_error()
    return Limits(predicted.peak_bytes_per_gpu / (1 + error), predicted.peak_bytes_per_gpu / (1 - error))


def outcome(predicted: PredictedRun) -> str:
    """Return what the run is predicted to do: "trains", "runs out", or "open" if the limits of its peak allow both.

    A run that is predicted to fit has to train. A run that is predicted not to fit has to run out of memory only if
    its tensors do not fit even at the lower limit.
    """
    if predicted.lacking:
        return f"lacks {predicted.lacking}"
    if predicted.fits:
        return "trains"
    return "runs out" if limits(predicted).low > predicted.usable_bytes else "open"


@cache
def predicted_runs(study: str, gpu: str, num_gpus: int = 1) -> list[PredictedRun]:
    """Return the predictions of a study's configurations that use all GPUs of a machine."""
    made = predictions.predict_study(studies.find(study), gpu, num_gpus)
    return [run for run in made.predictions if run.world_size == num_gpus]


# ---------------------------------------------------------------- the order, and how long it takes


def order_on_one_gpu() -> str:
    """Return the table of the list of `make gpu`, as far as it begins within the hour: the
    predicted minutes on each machine, and their sum.

    The sum is of all lines so far.
    """
    if this_machine.find().gpu_memory_bytes:
        raise Refusal("a GPU is here, so all minutes would be predicted for it. Set CUDA_VISIBLE_DEVICES to nothing.")
    rows = []
    so_far = dict.fromkeys(ALONE, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for number, item in enumerate(one_gpu.ITEMS, 1):
            cells = []
            for gpu in ALONE:
                minutes = item.state(one_gpu.Place(Path(folder), None, False, gpu)).seconds / 60
                so_far[gpu] += minutes
                cells.append(f"{minutes:.0f} ({so_far[gpu]:.0f})")
            rows.append([number, item.title, f"`{item.folder(one_gpu.Place(Path(), None, False)).name}`", *cells])
            if min(so_far.values()) > one_gpu.MINUTES:
                break
    return _table(["", "runs", "study", *(f"minutes on {gpu} (so far)" for gpu in ALONE)], rows, num_texts=3)


class Command(NamedTuple):
    """A command of the plan for several GPUs."""

    study: str
    only: str  # a part of the ids of its runs; empty for all runs
    num_runs: int
    minutes: float  # predicted, of all its runs
    limit: int  # minutes

    @property
    def text(self) -> str:
        only = [f"--only={self.only}"] * bool(self.only)
        return " ".join(["zero-study run", self.study, *only, f"--minutes {self.limit}"])


def commands(machine: Machine) -> list[Command]:
    """Return the commands for a machine with several GPUs. Their limits add up to the time for runs in a paid hour.

    Each study gets a minute more than its runs are predicted to take, and FILLING the rest.
    """
    history = History(True, hardware.find_gpu(machine.gpu))
    parts = []
    for study, ids in STUDIES.items():
        only = ids.format(machine.num_gpus)
        runs = [run for run in studies.runs(studies.find(study)) if only in run.run_id]
        minutes = sum(history.estimate(run).seconds for run in runs) / 60
        parts.append(Command(study, only, len(runs), minutes, math.ceil(minutes) + 1))
    rest = one_gpu.MINUTES - sum(part.limit for part in parts if part.study != FILLING)
    return [part._replace(limit=rest) if part.study == FILLING else part for part in parts]


def order_on_several_gpus() -> str:
    """Return the table of the commands for several GPUs, with the number of runs and their predicted minutes.

    The sum of the minutes so far counts each command with its limit, if its runs take longer.
    """
    rows = []
    for machine in PLANNED:
        so_far = 0.0
        for command in commands(machine):
            so_far += min(command.minutes, command.limit)
            cell = f"{command.minutes:.0f} ({so_far:.0f})"
            rows.append([machine.name, f"`{command.text}`", command.num_runs, cell])
    return _table(["GPUs", "command", "runs", "minutes of all runs (so far)"], rows, num_texts=2)


def prices() -> str:
    """Return the table of what an hour of each machine costs."""
    rows = [
        [machine.name, f"[{machine.file}](../docs/clouds/{machine.file})" if machine.file else "", machine.price_source,
         _dollars(machine, 60), _dollars(machine, IDLE_MINUTES)]
        for machine in MACHINES
    ]  # fmt: skip
    head = ["GPUs", "file", "price of", "USD per hour", f"USD for {IDLE_MINUTES} idle minutes"]
    return _table(head, rows, num_texts=3)


def _dollars(machine: Machine, minutes: float) -> str:
    return f"{machine.dollars_per_hour * minutes / 60:.2f}"


# ---------------------------------------------------------------- the files that rent machines


def block(name: str) -> re.Pattern[str]:
    """Return the pattern of the lines that this program writes into a file, between two comments."""
    return re.compile(rf"( *)(# <{name}>[^\n]*\n)(.*?)( *# </{name}>)", re.DOTALL)


def written(machine: Machine) -> str:
    """Return the content of a machine's file with the commands of the plan and the price of today."""
    assert machine.file is not None
    content = (CLOUDS / machine.file).read_text(encoding="utf-8")
    parts = {"price": _price_comment(machine)}
    if machine in PLANNED:
        folders = [f"runs/{study}" for study in STUDIES]
        pack = " ".join(["zero-study pack", *folders, "runs/first-hour.zip"])
        parts["plan"] = [*(command.text for command in commands(machine)), pack]
    for name, lines in parts.items():
        content = _replace(content, name, lines)
    return content


def _replace(content: str, name: str, lines: Iterable[str]) -> str:
    """Return a file's content with other lines between the two comments of this name."""

    def replaced(found: re.Match[str]) -> str:
        indent, begin, _, end = found.groups()
        return "".join([indent, begin, *(f"{indent}{line}\n" for line in lines), end])

    content, number = block(name).subn(replaced, content)
    assert number == 1, f"there is no place for the {name}"
    return content


def _price_comment(machine: Machine) -> list[str]:
    text = (
        f"An hour costs {_dollars(machine, 60)} USD ({machine.price_source}): about {one_gpu.SET_UP_MINUTES} min of "
        f"set-up, and at most {one_gpu.MINUTES} min of runs. The {IDLE_MINUTES} idle minutes, after which SkyPilot "
        f"gives the machine back, cost {_dollars(machine, IDLE_MINUTES)} USD more."
    )
    return textwrap.wrap(text, 116, initial_indent="# ", subsequent_indent="# ")


# ---------------------------------------------------------------- what the runs should show


def on_one_gpu() -> str:
    """Return the table of predictions for the machines with one GPU. The peak is the same on all of them."""
    rows = []
    for study in OF_ONE_GPU:
        machines = [predicted_runs(study, gpu) for gpu in ALONE]
        for alike in zip(*machines, strict=True):
            assert len({run.peak_bytes_per_gpu for run in alike}) == 1  # otherwise the table needs a column for each
            rows.append([*_named(alike[0]), _peak(alike[0]), *map(_outcome, alike)])
    return _table([*NAMED, "peak, GiB", *ALONE], rows, num_texts=2)


def on_several_gpus() -> str:
    """Return the table of predictions for 2 and 8 GPUs."""
    gpu, numbers = SEVERAL
    rows = []
    for study in OF_SEVERAL_GPUS:
        machines = [predicted_runs(study, gpu, number) for number in numbers]
        for alike in zip(*machines, strict=True):
            assert len({tuple(_named(run)) for run in alike}) == 1
            rows.append([*_named(alike[0]), *(f"{_peak(run)}; {_outcome(run)}" for run in alike)])
    return _table([*NAMED, *(f"{number} {gpu}" for number in numbers)], rows, num_texts=2)


def orders() -> str:
    """Return the table of the predicted orders of peaks, for each model and precision."""
    rows = []
    gpu, numbers = SEVERAL
    largest = max(ALONE, key=lambda name: hardware.find_gpu(name).memory_bytes)  # the peaks are the same on all of them
    blocks = [(study, largest, 1) for study in OF_ONE_GPU]
    blocks += [(study, gpu, number) for study in OF_SEVERAL_GPUS for number in numbers]
    for study, kind, number in blocks:
        for key, alike in groupby(sorted(predicted_runs(study, kind, number), key=_block), key=_block):
            runs = [run for run in alike if outcome(run) != "runs out"]
            if len(runs) > 1:
                rows.append([f"`{study}`", number, f"{_model(runs[0])}", key[-1], in_order(runs)])
    head = ["study", "GPUs", "model", "sequences per step", "strategies, from the lowest peak"]
    return _table(head, rows, num_texts=len(head))


def in_order(runs: Iterable[PredictedRun]) -> str:
    """Return strategies from the lowest predicted peak to the highest. A comma joins those that are not APART."""
    groups: list[list[PredictedRun]] = []
    for run in sorted(runs, key=lambda run: run.peak_bytes_per_gpu):
        if groups and run.peak_bytes_per_gpu <= (1 + APART) * groups[-1][0].peak_bytes_per_gpu:
            groups[-1].append(run)
        else:
            groups.append([run])
    return "; ".join(", ".join(f"`{run.strategy}`" for run in group) for group in groups)


def refuting() -> str:
    """Return the table of the results that would refute the planner, with their limits."""
    error = memory_error()
    rows = [
        ["a run with the prediction `trains` runs out of memory", "one run"],
        ["a run with the prediction `runs out` trains", "one run"],
        [
            "the largest measured peak of tensors of a rank is outside the limits of the table",
            f"one run; the limits are the prediction divided by {1 + error:.2f} and by {1 - error:.2f}",
        ],
        [
            "the measured peaks of two strategies have the opposite order, and a semicolon separates the two "
            "strategies in the table of orders",
            "one pair, if the measured peaks differ by more than 1 %",
        ],
        [
            "the median step time is outside the interval of the table",
            "; ".join(f"more than {tolerated(number)} of {number} runs" for number in (10, 20, 40)),
        ],
    ]
    return _table(["result", "limit"], rows, num_texts=2)


def tolerated(number: int) -> int:
    """Return how many of some runs may lie outside intervals that contain 90 % of cases.

    More than that have a probability below 5 % if the runs are independent.
    """
    chances = [math.comb(number, outside) * 0.1**outside * 0.9 ** (number - outside) for outside in range(number + 1)]
    return next(most for most in range(number + 1) if sum(chances[most + 1 :]) < 0.05)


# ---------------------------------------------------------------- the cells of the tables

NAMED = ("model", "strategy", "sequences per step")


def _named(run: PredictedRun) -> list[str]:
    return [_model(run), f"`{run.strategy}`", str(run.global_batch_size)]


def _model(run: PredictedRun) -> str:
    model = {"large": "BERT-large", "1.5b": "GPT 1.5 billion"}[run.size]
    adapter = "" if run.lora_rank is None else ", LoRA, 4 bits" if run.load_in_4bit else ", LoRA"
    return f"{model}, {run.precision}{adapter}"


def _block(run: PredictedRun) -> tuple[str, int]:
    return _model(run), run.global_batch_size


def _peak(run: PredictedRun) -> str:
    low, high = limits(run)
    return f"{terminal.gib(run.peak_bytes_per_gpu, 1)} ({terminal.gib(low, 1)} to {terminal.gib(high, 1)})"


def _outcome(run: PredictedRun) -> str:
    """Return what a run is predicted to do, with the seconds of a step and their interval if it may train."""
    if outcome(run) not in ("trains", "open"):
        return outcome(run)
    seconds = [terminal.significant(value) for value in (run.seconds_per_step, run.seconds_low, run.seconds_high)]
    return f"{outcome(run)}, {seconds[0]} s ({seconds[1]} to {seconds[2]})"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], num_texts: int) -> str:
    return "\n".join(terminal.markdown(head, rows, num_texts))


TABLES = {
    "hour_of_one_gpu": order_on_one_gpu,
    "hour_of_several_gpus": order_on_several_gpus,
    "hour_prices": prices,
    "hour_refuting": refuting,
    "hour_on_one_gpu": on_one_gpu,
    "hour_on_several_gpus": on_several_gpus,
    "hour_orders": orders,
}


def predictions_as_json() -> str:
    """Return the tables of predictions as JSON, with one object for each row."""
    tables = {}
    for name in ("hour_on_one_gpu", "hour_on_several_gpus", "hour_orders"):
        head, _, *rows = [line.strip("| ").split(" | ") for line in TABLES[name]().splitlines()]
        tables[name] = [dict(zip(head, row, strict=True)) for row in rows]
    return json.dumps(tables, indent=1) + "\n"


def main(words: Sequence[str]) -> None:
    """Print every table, or write the predictions and the files that rent machines."""
    if words:
        if words != ["--write"]:
            raise Refusal(f"{words[0]}: unknown. Give --write, or nothing to print the tables.")
        for machine in MACHINES:
            if machine.file:
                (CLOUDS / machine.file).write_text(written(machine), encoding="utf-8")
        PREDICTIONS.write_text(predictions_as_json(), encoding="utf-8")
        return
    for name, make in TABLES.items():
        print(f"{name}\n\n{make()}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refusal as refusal:
        print(f"tools/derive/first_hour.py: {refusal}", file=sys.stderr)
        sys.exit(2)
