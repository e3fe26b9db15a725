"""Simulate a model or a script as some ranks of a larger world: the command `zero-study dry-run`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from study import files, progress, terminal
from study.dryrun import deadlock, models, ranks, real_ranks, script, text, trace, world
from study.dryrun.models import Trainable
from study.dryrun.tracker import Call
from study.dryrun.world import Environment
from study.engines import extensions
from study.errors import Refusal
from study.theory.engine import Job

MOST_RANKS = 1 << 14  # the largest world; engines keep lists of all ranks, and stage 3 takes 40 s for this many
MOST_OF_A_SCRIPT = 4  # the largest world in which a script runs as all ranks by default
REAL_BYTES = 40  # bytes per parameter if tensors have memory: fp32 states, full gradients and buckets
SHARE = 0.5  # the share of this machine's free memory that a dry run may use

Answers = dict[int, dict[str, Any]]  # of each rank


@dataclass(frozen=True)
class World:
    """The ranks of a dry run, and the environment variables with which each rank is launched."""

    size: int
    local_size: int  # ranks on one machine
    ranks: list[int]  # those that are run
    variables: Environment
    are_all_there: bool = False  # all ranks are run, and exchange real values


def command(
    file: Path,
    script_words: Sequence[str],
    world_size: int,
    ranks_wanted: str | None,
    per_machine: int,
    output: Path | None,
    model: str,
    sequence_length: int | None,
    mixed_precision: str | None,
    activation_checkpointing: bool,
    **batch: int,
) -> int:
    """Run the ranks, print their results, and return the exit status.

    Raises Refusal if the file, the script or the options cannot be simulated.
    """
    if output is not None:
        files.require_folder(output)
    if world_size > MOST_RANKS:
        raise Refusal(
            f"--world {world_size}: engines keep lists of all ranks, so at most {MOST_RANKS:,} can be simulated."
        )
    chosen = _ranks(ranks_wanted, world_size, bool(script_words))
    if script_words and not Path(script_words[0]).is_file():
        raise Refusal(
            f"{script_words[0]}: there is no such script. What follows the strategy is read as a script and its "
            "arguments, so write the options of dry-run before the strategy."
        )
    trainable = None if script_words else models.find(model, sequence_length)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    extensions.use_own_folder()
    variables = world.launch_environment(file, world_size, mixed_precision, bool(script_words))
    are_all_there = bool(script_words) and len(chosen) == world_size <= real_ranks.MOST_RANKS
    place = World(world_size, min(per_machine, world_size), chosen, variables, are_all_there)
    if trainable is None:
        progress.at_once(f"Running the script as {terminal.counted(len(chosen), 'rank')}")
        answers = run_script(script_words, place)
        title, notes = Path(script_words[0]).name, tuple[str, ...]()
    else:
        micro_batch_size, micro_steps = batch["micro_batch_size"], batch["gradient_accumulation_steps"]
        job = Job(micro_batch_size, trainable.sequence_length, micro_steps, activation_checkpointing)
        progress.at_once(f"Running three training steps as {terminal.counted(len(chosen), 'rank')} of {world_size:,}")
        answers = _train(trainable, job, place)
        title, notes = f"{trainable.name}, {micro_batch_size} x {job.sequence_length} tokens", trainable.notes
    if output is not None:
        exchange = "real" if are_all_there else "pretended"
        content = {"file": str(file), "world_size": world_size, "exchange": exchange, "ranks": answers}
        files.write_json(output, content)
    ranks_text = f"rank {chosen[0]}" if len(chosen) == 1 else f"ranks {', '.join(map(str, chosen))}"
    title_line = f"Dry run of {file.stem}: {title}, {ranks_text} of {world_size:,}."
    kind = text.REAL if are_all_there else text.TRACED
    return _report(answers, place, [title_line, *(f"Note: {note}." for note in notes), kind], trainable is not None)


def _ranks(numbers: str | None, world_size: int, has_script: bool) -> list[int]:
    """Return the ranks to run.

    By default, these are the first and the last rank. If a script runs in a small world, they are all ranks. Raises
    Refusal if `numbers` is not a list of ranks of the world.
    """
    if numbers is None:
        return [*range(world_size)] if has_script and world_size <= MOST_OF_A_SCRIPT else sorted({0, world_size - 1})
    words = numbers.split(",")
    if not all(word.isdecimal() and int(word) < world_size for word in words):
        raise Refusal(f"--ranks {numbers}: ranks must be numbers from 0 to {world_size - 1}, separated by commas.")
    return sorted({int(word) for word in words})


def run_script(words: Sequence[str], place: World) -> Answers:
    """Run a script with its arguments as these ranks, and return the answer of each rank.

    Raises Refusal if a rank refuses, and RunFailed if a rank ends without an answer.
    """
    if not place.are_all_there:
        return ranks.run(lambda: script.run(Path(words[0]), words[1:]), _places(place))
    with tempfile.TemporaryDirectory(prefix="zero-study-") as name:
        folder = Path(name)
        places = _places(place, folder / "meeting")
        return real_ranks.run(lambda: script.run(Path(words[0]), words[1:], folder), places, folder)


def _train(model: Trainable, job: Job, place: World) -> Answers:
    has_memory = _has_memory(place.variables, model, len(place.ranks))
    return ranks.run(trace.trainer(model, job, has_memory), _places(place))


def _places(place: World, meeting: Path | None = None) -> dict[int, Any]:
    return {
        rank: world.rank_of_many(rank, place.size, place.local_size, place.variables, meeting) for rank in place.ranks
    }


def _report(answers: Answers, place: World, about: Sequence[str], has_memory: bool) -> int:
    """Print whether the ranks agree, then memory and collectives, and return the exit status.

    `about` has sentences on the dry run, which are printed below the answer. The exit status is 1 if ranks would hang
    or have failed, and 0 otherwise.
    """
    calls = {rank: [Call.read(call) for call in answer["calls"]] for rank, answer in answers.items()}
    mismatches = deadlock.first_mismatches(calls, by_module=not place.are_all_there)
    raised = text.raised(answers, is_explained=bool(mismatches))
    waiting = {rank: calls[rank] for rank, answer in answers.items() if answer.get("waits")}
    lines = [*text.mismatches(mismatches, place.ranks, place.are_all_there)]
    lines += [] if mismatches else text.waiting(waiting)
    parts = ["\n".join(text.indented([*lines, *raised])), "\n".join(map(terminal.wrapped, about))]
    parts += [text.memory(answers)] if has_memory else []
    print("\n\n".join(filter(None, [*parts, text.communication(calls[place.ranks[0]], place.size)])))
    has_failed = any(answer.get("raised") or answer.get("ended") for answer in answers.values())
    return 1 if mismatches or waiting or has_failed else 0


def _has_memory(variables: Mapping[str, str], model: Trainable, num_ranks: int) -> bool:
    """Say whether the tensors get real memory.

    They do if the model fits into this machine's free memory. Raises Refusal for a model that does not fit but is
    offloaded, because offload computes with real numbers. Also raises Refusal for NVMe offload.
    """
    offload = {variables.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") for part in ("OPTIMIZER", "PARAM")}
    if "nvme" in offload:
        raise Refusal(world.NO_SWAPPING)
    free = psutil.virtual_memory().available * SHARE
    needed = REAL_BYTES * model.num_params * min(num_ranks, 2)
    if needed < free:
        return True
    if offload == {"none"}:
        return False
    raise Refusal(
        f"{model.name} needs {needed / 2**30:.0f} GiB of this machine's memory, because offload computes with real "
        f"numbers, but only {free / 2**30:.0f} GiB may be used. Name a smaller model, or a file without offload."
    )
