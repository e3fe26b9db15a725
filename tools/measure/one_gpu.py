"""Run a prioritized list of studies and benchmarks on a GPU that is available for some minutes, and pack the results.

    python tools/measure/one_gpu.py [--minutes 45] [--data-dir DIR]  # or: make gpu
    python tools/measure/one_gpu.py --plan                           # list the remaining items and their expected time
    python tools/measure/one_gpu.py --small                          # rehearse on a CPU with tiny models and few steps

The most valuable items come first. Finished items are kept, and the next call continues after them. No item is started
if it is not expected to end in time. After each item, all results so far are written into one pack.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from study.compare import acceptance
from study.records import pack
from study.run import Run
from study.running import lock, plan, runner, studies
from study.running.estimate import GPU_LAUNCH_SECONDS, History, duration
from study.running.runner import ALL_OK, SOME_NOT_OK, SOME_WITHOUT_OUTCOME, Slot
from study.running.studies import Part, Study
from study.workloads import sources
from zero_study import files, terminal
from zero_study.engines import extensions, this_machine
from zero_study.errors import Refusal, refusing
from zero_study.theory import hardware

PAID_MINUTES = 60
# Of these, for installing and compiling: 12 minutes were measured on two cores, without the download of PyTorch.
SET_UP_MINUTES = 15
MINUTES = PAID_MINUTES - SET_UP_MINUTES  # of runs

USUAL_GPU = "h200"  # that times are predicted for where there is none
LIMIT_IN_THE_SMALL = 600.0  # seconds of one run: compiling is slow on a CPU
PACK, PAGE = "one-gpu.zip", "acceptance.md"


@dataclass(frozen=True)
class Place:
    """The folder of the results, the source of texts, and whether this is a rehearsal with tiny models."""

    folder: Path
    data_dir: Path | None
    is_small: bool
    gpu: str = USUAL_GPU  # that times are predicted for if no GPU is here


class State(NamedTuple):
    """The remaining work of an item."""

    to_run: int
    kept: int
    skipped: int
    seconds: float  # expected of what is to run; without a GPU, of what would be on one


@dataclass(frozen=True)
class Runs:
    """Runs of a study."""

    title: str
    study: str
    ids: str = ""  # only those in whose id this regular expression is found
    timeout_seconds: float = 600.0  # of one run: one that hangs must not take the slot with it

    def folder(self, place: Place) -> Path:
        return place.folder / self.study

    def chosen(self, place: Place) -> tuple[Study, list[Run]]:
        study = studies.find(self.study)
        study = shrink(study) if place.is_small else study
        runs = studies.runs(study, place.data_dir if study.text == "real" else None, self.folder(place))
        return study, [run for run in runs if re.search(self.ids, run.run_id)]

    def state(self, place: Place) -> State:
        made = plan.make_plan(*self.chosen(place), self.folder(place), self._limit(place), retry=False)
        kept = sum(one.kept is not None for one in made.runs)
        to_run = sum(one.to_run for one in made.runs)
        if made.box.gpu_memory_bytes or place.is_small:
            seconds = sum(made.estimate(one).seconds for one in made.runs if one.to_run)
        else:
            seconds = sum(_on_gpu(one.run, place) for one in made.runs if one.kept is None)
        return State(to_run, kept, len(made.runs) - kept - to_run, seconds)

    def run(self, place: Place, slot: Slot) -> int:
        study, runs = self.chosen(place)
        return runner.run(study, runs, self.folder(place), self._limit(place), False, slot) if runs else ALL_OK

    def _limit(self, place: Place) -> float:
        return LIMIT_IN_THE_SMALL if place.is_small else self.timeout_seconds


# In order of value. A second seed says less than a first run of something else, so that of the large model is last.
ITEMS: tuple[Runs, ...] = (
    Runs("acceptance of every strategy", "gpu-acceptance", timeout_seconds=240.0),
    Runs("BERT-large: memory, time, MFU", "gpu-bert-large"),
    Runs("GPT of 1.5 billion: memory, time, MFU", "gpu-gpt2-xl", r"-seed0-batch\d+-(autocast|bf16)$"),
    Runs("LoRA, and frozen weights in 4 bits", "gpu-lora"),
    Runs("bytes of 2, 4, 8 ranks on the card", "shared-gpu", r"^bert-imdb-\w+-(single|ddp|zero[123])-\d"),
    Runs("GPT of 1.5 billion: the largest batch", "gpu-gpt2-xl", r"-largest$"),
    Runs("GPT 124m to 6b: peaks", "model-size", r"-(single|zero3|zero3_cpu_offload)-1x-seed0-batch8\b"),
    Runs("GPT of 1.5 billion: the second seed", "gpu-gpt2-xl", r"-seed1-"),
)


def show(items: Sequence[Runs], place: Place) -> str:
    """Print the list: the remaining work of each item, and how long it is expected to take."""
    machine = this_machine.find()
    states = [item.state(place) for item in items]
    rows = [
        [number, item.title, item.folder(place).name, *state[:3], f"{state.seconds / 60:.1f}"]
        for number, (item, state) in enumerate(zip(items, states, strict=True), 1)
    ]
    head = ["", "item", "study", "to run", "kept", "skipped", "minutes"]
    total = duration(sum(state.seconds for state in states))
    basis = "by earlier runs on a CPU"
    if not place.is_small:
        gpu = machine.gpu_name or f"{place.gpu}, because no GPU is here"
        basis = f"predicted for {gpu}: launches of {GPU_LAUNCH_SECONDS:.0f} s, steps by the planner or earlier runs"
    table = "\n".join(terminal.table(head, rows, sides="><<<<<<", has_ruler=True))
    return f"{table}\nabout {total} in all; minutes are {basis}"


def run(items: Sequence[Runs], place: Place, slot: Slot) -> int:
    """Run the items of the list that fit into the slot, and return an exit status like that of `zero-study run`.

    Raises Refusal if there is no GPU, if the texts are missing, or if another call uses the same folder.
    """
    if not place.is_small and not this_machine.find().gpu_memory_bytes:
        raise Refusal("no GPU is here; --small rehearses the list on a CPU, --plan shows it")
    if not place.is_small and place.data_dir is None:  # known now, and not after a launch of each run
        sources.from_hub("the texts of the list", lambda: None, "pass --data-dir FOLDER")
    slot.first_runs_regardless = False  # what does not end in time is not started, be it the first
    statuses, minutes = [], []
    with lock.locked_study(place.folder):
        try:
            _build_extensions()
            for number, item in enumerate(items, 1):
                print(
                    f"\n== {number}/{len(items)} {item.title}; the slot has {duration(slot.seconds_left)} left",
                    flush=True,
                )
                began = time.monotonic()
                statuses.append(_status(item, place, slot))
                minutes.append([item.title, f"{(time.monotonic() - began) / 60:.1f}"])
                if slot.interrupted:
                    break
                _take_home(items, place)
        except KeyboardInterrupt:
            slot.interrupted = True
            print("interrupted", flush=True)
        finally:
            _take_home(items, place)
        print("", *terminal.table(["item", "minutes now"], minutes, sides="<<", has_ruler=True), sep="\n")
        if slot.interrupted or SOME_WITHOUT_OUTCOME in statuses:
            print("some of the list is left; the same command goes on with it")
            return SOME_WITHOUT_OUTCOME
    return max(statuses, default=ALL_OK)


def _build_extensions() -> None:
    """Build the extensions for offload once per machine. Without them, strategies with offload are skipped."""
    try:
        extensions.provide(extensions.OF_STRATEGIES, "offload")
    except Refusal as refusal:
        print(refusal, flush=True)


def _status(item: Runs, place: Place, slot: Slot) -> int:
    """Run one item. If it is refused, the following items still run."""
    try:
        return item.run(place, slot)
    except Refusal as refusal:
        print(f"zero-study: {refusal}", file=sys.stderr, flush=True)
    except Exception:  # a fault of ours in one item must not cost the card's time for the others
        traceback.print_exc()
    return SOME_NOT_OK


def _take_home(items: Sequence[Runs], place: Place) -> None:
    """Write the page of accepted results, and a pack of all results."""
    folders = [folder for item in items if (folder := item.folder(place)).is_dir()]
    try:
        page = acceptance.page([items[0].folder(place)])
        files.write_whole(place.folder / PAGE, f"{page}\n".encode())
    except Refusal as refusal:
        print(f"no {PAGE}: {refusal}", flush=True)
    try:
        pack.pack(folders, place.folder / PACK, replace=True)
    except Refusal as refusal:
        print(f"not packed: {refusal}", flush=True)


def _on_gpu(run: Run, place: Place) -> float:
    """Estimate the seconds of a run on the GPU of this machine, or on the requested one."""
    gpu_name = this_machine.find().gpu_name
    return History(True, (gpu_name and hardware.find(gpu_name)) or hardware.find_gpu(place.gpu)).estimate(run).seconds


# ---------------------------------------------------------------- rehearsed on a CPU

# Steps enough for the warm-up, the probed step and two that are timed.
AT_MOST = {"sequence_length": 16, "num_train_examples": 64, "num_eval_examples": 4, "max_steps": 8, "epochs": 1}
BATCHES = (4, 8)
LARGEST_WORLD = 2


def shrink(study: Study) -> Study:
    """Return a study with tiny models, few short steps, at most two processes and one seed, on the bundled sample."""
    parts = tuple(_smaller(part) for part in study.parts)
    return study.model_copy(update={"text": "bundled", "device": "any", "parts": parts})


def _smaller(part: Part) -> Part:
    flags: dict[str, Any] = {**part.flags, "size": "tiny", "init": "scratch"}
    flags.setdefault("learning_rate", 1e-3)
    flags |= {knob: min(flags.get(knob) or most, most) for knob, most in AT_MOST.items()}
    batches = part.global_batch_sizes
    if batches is None:
        flags["global_batch_size"] = min(flags.get("global_batch_size") or BATCHES[-1], BATCHES[-1])
    return part.model_copy(
        update={
            "flags": flags,
            "global_batch_sizes": batches and BATCHES[: len(batches)],
            "world_sizes": tuple(sorted({min(size, LARGEST_WORLD) for size in part.world_sizes})),
            "seeds": part.seeds[:1],
            "repeats": 1,
            # Parts that differ in nothing but the size of the model.
            "label": part.label or part.flags.get("size", "").replace(".", "_"),
        }
    )


# ---------------------------------------------------------------- the command


@click.command()
@click.option("--minutes", type=click.IntRange(1), default=MINUTES, help="start nothing that is expected to end later")
@click.option("--data-dir", type=click.Path(path_type=Path), help="folder with imdb/, wikitext-2/ and tokenizers/")
@click.option("--runs-dir", type=click.Path(path_type=Path), default="runs", help="for run directories and the pack")
@click.option("--plan", "only_plan", is_flag=True, help="only list what is left, and how long it takes")
@click.option("--gpu", default=USUAL_GPU, help="with --plan, the kind of GPU if none is here, as in zero-study advise")
@click.option("--small", is_flag=True, help="rehearse the list on a CPU, in RUNS_DIR/small")
def main(minutes: int, data_dir: Path | None, runs_dir: Path, only_plan: bool, gpu: str, small: bool) -> None:
    """Run the items of the list, the most valuable first, until the time is used; then pack the results.

    The exit status is that of `zero-study run`.
    """
    slot = Slot(60.0 * minutes)
    place = Place(runs_dir / "small" if small else runs_dir, data_dir, small, gpu)
    try:
        with refusing():
            hardware.find_gpu(gpu)
        print(show(ITEMS, place), flush=True)
        sys.exit(ALL_OK if only_plan else run(ITEMS, place, slot))
    except Refusal as refusal:
        print(f"tools/measure/one_gpu.py: {refusal}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
