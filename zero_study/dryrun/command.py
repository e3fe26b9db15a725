"""Simulate the training of a model or a script on some ranks of a larger world: the command `zero-study dry-run`."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from zero_study import files, progress, terminal
from zero_study.answers.envelope import Answer
from zero_study.dryrun import chosen, deadlock, json_answer, models, real_ranks, script, text, trace, world
from zero_study.dryrun.models import Trainable
from zero_study.dryrun.tracker import Call
from zero_study.dryrun.world import Environment
from zero_study.engines import extensions
from zero_study.errors import Refusal
from zero_study.ranks import forks
from zero_study.theory.engine import StepConfig
from zero_study.verdict import Checked, NotChecked, Verdict

MOST_RANKS = 1 << 14  # the largest world; engines keep lists of all ranks, and stage 3 takes 40 s for this many
RANK_BYTES = 3 << 28  # free memory of this machine per rank that a script needs to run as all ranks by default
MOST_SECONDS = 60.0  # in which ranks are run that the script does not name
REAL_BYTES = 40  # bytes per parameter if tensors have memory: fp32 states, full gradients and buckets
SHARE = 0.5  # the share of this machine's free memory that a dry run may use

Answers = dict[int, dict[str, Any]]  # of each rank


@dataclass(frozen=True)
class World:
    """The ranks that a dry run simulates, and the environment variables of each rank."""

    size: int
    local_size: int  # ranks on one machine
    ranks: list[int]  # those that are run
    variables: Environment
    are_all_there: bool = False  # all ranks are run, and exchange real values
    others: tuple[int, ...] = ()  # further ranks that are run if there is time


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
    as_json: bool = False,
    **batch: int,
) -> Verdict | Answer:
    """Run a dry run, print the results of its ranks, and return the verdict.

    If `as_json` is True, the results are returned as the answer for JSON instead. Raises Refusal if the file, the
    script or the options cannot be simulated.
    """
    if output is not None:
        files.require_folder(output)
    if world_size > MOST_RANKS:
        raise Refusal(
            f"--world {world_size}: engines keep lists of all ranks, so at most {MOST_RANKS:,} can be simulated."
        )
    if script_words and not Path(script_words[0]).is_file():
        raise Refusal(
            f"{script_words[0]}: this script does not exist. Everything after the strategy is taken as a "
            "script and its arguments, so write the options of dry-run before the strategy."
        )
    selected, further = _ranks(ranks_wanted, world_size, script_words, per_machine)
    trainable = None if script_words else models.find(model, sequence_length)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    extensions.use_own_folder()
    variables = world.launch_environment(file, world_size, mixed_precision, bool(script_words))
    are_all_there = bool(script_words) and len(selected) == world_size <= world.MOST_REAL_RANKS
    place = World(world_size, min(per_machine, world_size), selected, variables, are_all_there, tuple(further))
    if trainable is None:
        progress.at_once(f"Running the script as {terminal.count(len(selected), 'rank')}")
        answers = run_script(script_words, place)
        title, notes = Path(script_words[0]).name, tuple[str, ...]()
    else:
        micro_batch_size, micro_steps = batch["micro_batch_size"], batch["gradient_accumulation_steps"]
        job = StepConfig(micro_batch_size, trainable.sequence_length, micro_steps, activation_checkpointing)
        progress.at_once(
            f"Running three training steps on {terminal.count(len(selected), 'simulated rank')} of {world_size:,}"
        )
        answers = _train(trainable, job, place)
        title, notes = f"{trainable.name}, {trainable.batch_in_words(micro_batch_size)}", trainable.notes
    examined = _Examined(answers, place, trainable is not None)
    verdict = examined.verdict()
    exchange = "real" if are_all_there else "pretended"
    content = {"file": str(file), "world_size": world_size, "exchange": exchange}
    if output is not None:
        files.write_json(output, content | verdict.content() | {"ranks": answers})
    if as_json:
        return examined.answer(verdict, {**content, "notes": list(notes), "ranks": answers})
    ranks_text = f"rank {examined.ranks[0]}" if len(answers) == 1 else f"ranks {', '.join(map(str, examined.ranks))}"
    title_line = f"Dry run of {file.stem}: {title}, {ranks_text} of {world_size:,}."
    kind = text.REAL if are_all_there else text.TRACED
    examined.report([title_line, *(f"Note: {note}." for note in notes), kind], verdict)
    return verdict


def _ranks(
    numbers: str | None, world_size: int, script_words: Sequence[str], per_machine: int
) -> tuple[list[int], list[int]]:
    """Return the ranks to run, and further ranks to run if there is time.

    By default, a model runs as the first and the last rank. A script runs as all ranks of a small world, if this
    machine has the memory, and otherwise as the ranks of `chosen.of_script`. Raises Refusal if `numbers` is not a list
    of ranks of the world.
    """
    if numbers is None and script_words:
        fits = psutil.virtual_memory().available > RANK_BYTES * world_size
        if world_size <= world.MOST_REAL_RANKS and (fits or world_size <= 2):
            return [*range(world_size)], []
        needed, further = chosen.of_script(Path(script_words[0]), script_words[1:], world_size, per_machine)
        return sorted(needed), further
    if numbers is None:
        return sorted({0, world_size - 1}), []
    words = numbers.split(",")
    if not all(re.fullmatch("[0-9]{1,9}", word) and int(word) < world_size for word in words):
        raise Refusal(f"--ranks {numbers}: ranks must be numbers from 0 to {world_size - 1}, separated by commas.")
    return sorted({int(word) for word in words}), []


def run_script(words: Sequence[str], place: World) -> Answers:
    """Run a script with its arguments on the ranks of a dry run, and return the results by rank.

    Raises Refusal if a rank refuses, and RunFailed if a rank ends without an answer.
    """
    if not place.are_all_there:
        return _run_some(lambda: script.run(Path(words[0]), words[1:]), place)
    with tempfile.TemporaryDirectory(prefix="zero-study-") as name:
        folder = Path(name)
        places = _places(place, folder / "meeting")
        return real_ranks.run(lambda: script.run(Path(words[0]), words[1:], folder), places, folder)


def _run_some(program: forks.Program, place: World) -> Answers:
    """Run a program on the ranks of a dry run, and then on further ranks while there is time."""
    began = time.monotonic()
    answers = forks.run(program, _places(place))
    seconds = time.monotonic() - began
    num_more = int((MOST_SECONDS - seconds) / max(seconds / len(place.ranks), 0.01)) if seconds < MOST_SECONDS else 0
    more = replace(place, ranks=list(place.others[:num_more]))
    return dict(sorted((answers | forks.run(program, _places(more))).items()))


def _train(model: Trainable, job: StepConfig, place: World) -> Answers:
    has_memory = _has_memory(place.variables, model, len(place.ranks))
    return forks.run(trace.trainer(model, job, has_memory), _places(place))


def _places(place: World, meeting: Path | None = None) -> dict[int, Any]:
    return {
        rank: world.rank_of_many(rank, place.size, place.local_size, place.variables, meeting) for rank in place.ranks
    }


class _Examined:
    """The collectives of the ranks that were run, and what is wrong with them."""

    def __init__(self, answers: Answers, place: World, is_model: bool) -> None:
        self._answers = answers
        self._place = place
        self._is_model = is_model
        self.ranks = sorted(answers)
        self._calls = {rank: [Call.read(call) for call in answer["calls"]] for rank, answer in answers.items()}
        self._mismatches = deadlock.first_mismatches(self._calls, by_module=not place.are_all_there)
        self._waiting = {rank: self._calls[rank] for rank, answer in answers.items() if answer.get("waits")}
        failures = text.failures(answers)
        self._num_failed, own = len(failures), text.own_failures(failures)
        # The messages of a rank that failed are lost for that reason.
        self._lost = [] if own else deadlock.lost_messages(self._calls)
        # An error that only follows from the end of another rank is left out if anything else explains it.
        self._failures = own if own or self._mismatches or self._lost else failures

    def verdict(self) -> Verdict:
        """Return the verdict: whether the simulated ranks make the same calls, and which ranks were not simulated."""
        num_findings = len(self._mismatches) + len(self._lost) + len(self._waiting) + self._num_failed
        collectives, messages = deadlock.num_compared(self._calls) if len(self.ranks) > 1 else (0, 0)
        checked = [
            Checked(len(self.ranks) * self._is_model, "rank", "traced"),
            Checked(collectives, "collective", f"compared between {len(self.ranks)} ranks"),
            Checked(messages, "message", "compared between sender and receiver"),
        ]
        return Verdict.of(num_findings, checked, self._not_checked())

    def _not_checked(self) -> Iterator[NotChecked]:
        size = self._place.size
        if len(self.ranks) < size:
            missing = [rank for rank in range(size) if rank not in self._answers]
            yield NotChecked(chosen.in_words(missing), "not run")
        if len(self.ranks) == 1 < size:
            yield NotChecked("hangs", f"only {chosen.in_words(self.ranks)} was run", not self._is_model)
        if num_messages := deadlock.num_messages_to_absent_ranks(self._calls):
            yield NotChecked(
                terminal.count(num_messages, "message"), "sent to ranks, or received from ranks, that were not run"
            )
        if not (self._is_model or self._place.are_all_there):
            yield NotChecked("decisions that depend on values of other ranks", "the ranks exchange no values")

    def report(self, about: Sequence[str], verdict: Verdict) -> None:
        """Print whether the simulated ranks make the same calls, then their memory and collectives.

        `about` has sentences about the dry run, which are printed below the first sentence.
        """
        raised = [f"rank {rank} {reason}" for rank, reason in self._failures.items()]
        hangs = [*text.mismatches(self._mismatches)] or [*text.waiting(self._waiting)]
        hangs += text.lost_messages(self._lost)
        is_cause = deadlock.follow_from(self._failures, self._mismatches)
        lines = ([*raised, *hangs] if is_cause else [*hangs, *raised]) or [self._answer(verdict)]
        lines += [f"Not checked: {check}." for check in verdict.not_checked]
        parts = ["\n".join(text.indented(lines)), "\n".join(map(terminal.wrap, about))]
        parts += [text.memory(self._answers)] if self._is_model else []
        print("\n\n".join([*parts, text.communication(self._calls[self.ranks[0]], self._place.size)]))

    def answer(self, verdict: Verdict, content: Mapping[str, Any]) -> Answer:
        """Return the answer for --json. `content` is what --output writes, but without the verdict."""
        return json_answer.of(verdict, content, self._mismatches, self._lost, self._waiting, self._failures)

    def _answer(self, verdict: Verdict) -> str:
        """Return the first sentence of the report if nothing is wrong."""
        if len(self.ranks) == 1:
            only = chosen.in_words(self.ranks)
            reason = "there is only one rank" if self._place.size == 1 else f"only {only} was run"
            return f"Nothing to compare: {reason}."
        if verdict.result == "unknown":
            return (
                f"Nothing was compared: {chosen.in_words(self.ranks)} of {self._place.size:,} take part in no "
                "common collective."
            )
        return text.no_hang(self.ranks, self._place.size)


def _has_memory(variables: Mapping[str, str], model: Trainable, num_ranks: int) -> bool:
    """Return whether the tensors of a dry run get real memory.

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
        f"{model.name} needs {needed / 2**30:.0f} GiB of this machine's memory, because offload "
        f"computes with real numbers. At most {free / 2**30:.0f} GiB may be used. Name a smaller "
        "model, or a file without offload."
    )
