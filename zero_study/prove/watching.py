"""Check a training at its start and during one optimizer step, and then remove every hook: `watch` and `callback`."""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .. import terminal
from .. import verdict as verdicts
from ..engines.hooks import before_updates, wrap_function
from ..engines.readback.demands import Demand
from ..engines.readback.dtypes import dtype_name, precision_of, precision_of_autocast
from ..engines.readback.facts import (
    base_optimizer,
    ddp_of,
    engine_optimizer,
    inner_module,
    is_compiled,
    is_deepspeed,
    read_back,
    uncompiled,
    unwrapped_optimizer,
)
from ..engines.readback.parameters import whole_size
from ..engines.readback.states import count_states
from ..engines.scripts import rank
from ..verdict import Checked, Verdict
from ..version import __version__
from . import findings, loss_graph, mismatch, norms, reference, schedules, store_exchange, text, update
from .checksums import Checksum, of_batch, of_weights
from .demands import Request, by_arguments, by_file, by_json, by_launcher, content_of, requested_processes
from .every_step import Start, Watch
from .json_answer import fault_id
from .mismatch import ConfigMismatch, KnownFault, TrainingFault, Unverified
from .proved_step import Gradients, Step, depends_on_mode
from .ranks import Finding, Ranks
from .resuming import Resumed
from .ties import Ties

# The first step creates the optimizer's moments. In the second, ZeRO stage 3 traces the order of its parameters. The
# third step is the first steady one.
PROVED_STEP = 3
SMALL = 2**22  # parameters of a model whose gradient is compared with that of one process by default
WEIGHTS = "the update of the weights"
REFERENCE = "the gradient of one process"
REQUESTED = (REFERENCE,)  # beginnings of checks that are made only if they are requested
# A single step with fewer forward passes than requested may be the end of an epoch. This many in a row are not.
SHORT_STEPS = 3

# What a finding in the examined step implies: these kinds of findings would only repeat it.
_IMPLIED = {
    "gradients-not-averaged": ("ranks-differ", "gradients-differ", "clipped-per-rank"),
    "ranks-train-separately": ("ranks-differ", "gradients-differ", "clipped-per-rank"),
    "ranks-have-other-settings": ("ranks-differ",),
    "ranks-differ": ("gradients-differ", "clipped-per-rank"),
    "same-batch": ("overlapping-data",),
    "missing-zero-grad": ("carried-gradients",),
    "not-finite-weights": ("not-finite-loss", "other-update", "reset-states"),
    "no-weight-moved": ("zero-gradients",),
}

_outputs: set[Path] = set()  # the files of all proofs of this process
_numbers = itertools.count()  # the numbers of the proofs of this process


class Options(NamedTuple):
    """What a user asked of `prove`."""

    strict: bool = False
    allow_known_bad: bool = False
    has_reference: bool = False
    steps: int | None = None  # after which the training ends; None: it is not ended
    thorough: frozenset[int] = frozenset()  # steps that are examined besides the third
    examines_last: bool = False  # the last step is examined, too
    may_repeat: bool = True  # whether the samples of a small model may run again; not if somebody records the passes
    max_overhead: float | None = None  # the largest share of the time that checks of the watch may take


def watch(
    model: Any,
    optimizer: Any = None,
    *,
    config: Request | None = None,
    strict: bool = False,
    allow_known_bad: bool = False,
    output: str | Path = "proof.json",
    max_overhead: float | None = None,
) -> StepWatcher:
    """Verify how `model` and `optimizer` are built, examine the third optimizer step from now, and watch later steps.

    Call it on every rank, after `prepare`, `deepspeed.initialize`, DDP(...) or `fully_shard`. A DeepSpeed engine needs
    no `optimizer`. The measurement counts the memory of the model states and the collectives of the step.

    `config` has the settings that you expect: an accelerate file, a DeepSpeed JSON, or a dict like a DeepSpeed JSON. If
    it is None, only the settings that the launcher or the script passed on count as requested. Rank 0 writes the result
    to `output`, a JSON file. If a script makes several proofs, the second file is proof-2.json. The watch ends with
    the process, or if `end()` of the returned object is called. `max_overhead` is the largest share of the time that
    its checks may take, such as 0.02.

    Raises KnownFault on every rank if this release of DeepSpeed is known to train such an engine wrongly, unless
    `allow_known_bad` is True. With `strict`, it also raises ConfigMismatch, TrainingFault and Unverified, and a
    training that ends before the checked step ends with exit status 1. Without `strict`, these are only printed.
    """
    options = Options(strict, allow_known_bad, max_overhead=max_overhead)
    watcher = StepWatcher(options, Path(output))
    watcher.begin(model, optimizer, config, None)
    return watcher


def callback(
    *,
    config: Request | None = None,
    strict: bool = False,
    allow_known_bad: bool = False,
    output: str | Path | None = None,
    max_overhead: float | None = None,
) -> Any:
    """Return a callback for the Trainer of transformers or TRL that does the same as `watch`.

    The settings in the Trainer's TrainingArguments count as requested, too. `output` is by default proof.json in the
    Trainer's output folder.
    """
    from transformers import TrainerCallback

    class Prove(TrainerCallback):
        def __init__(self) -> None:
            self._watch: StepWatcher | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            """Begin the watch with the first forward pass of the training.

            Its outermost module that contains the model is watched, because Trainer does not name it.
            """
            model, optimizer = options["model"], options["optimizer"]
            path = Path(output or Path(args.output_dir, "proof.json"))
            self._watch = proof = StepWatcher(Options(strict, allow_known_bad, max_overhead=max_overhead), path)

            def begin(module: torch.nn.Module, _: Any) -> None:
                if model.training and any(part is model for part in module.modules()):
                    handle.remove()
                    proof.begin(module, optimizer, config, args, num_left=state.max_steps - state.global_step)

            handle = register_module_forward_pre_hook(begin)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self._watch is not None:
                self._watch.end()

    return Prove()


class StepWatcher:
    """A proof of one model: reads the settings of the built engine, examines one step, and watches all later ones."""

    def __init__(
        self,
        options: Options,
        output: Path,
        steps_before: int = 0,
        loaders: Loaders | None = None,
        ties: Ties | None = None,
        at_start: dict[str, Checksum] | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        """Set the options of a watch, which starts with `begin`.

        `steps_before` is the number of optimizer steps that the script has already taken. `loaders` are the data
        loaders that have already been recorded, or None. `at_start` has the checksums of the weights before them.
        """
        self._at_start = at_start
        self._options = options
        self._strict = options.strict
        self._ties = ties
        self._resumed = resumed
        self._output = _free(output)
        self._steps = steps_before
        self._short = 0  # steps in a row that had fewer forward passes than requested
        self._last: int | None = None  # DeepSpeed's number of the last step seen
        self._step: Step | None = None
        self._batches: list[Any] = []  # the first inputs of watched steps
        self._first: Any = None  # the hook that records the inputs of the step in which the watch begins
        self._before: dict[str, Checksum] = {}  # of the weights, as the first step to watch began
        self._rates: list[float] = []  # the learning rates at that time, one per parameter group
        self._num_updates: int | None = None  # of the whole training; None if it is unknown
        # Id of a schedule -> its steps at that time, and the number of the update.
        self._schedules: dict[int, tuple[int, int]] = {}
        self._loaders = Loaders() if loaders is None else loaders
        self._watch: Watch | None = None  # of the steps after the examined one
        self._averager: str | None = None  # of the gradients, as the examined step showed
        self._is_alone = False  # other ranks do not count the examined step
        self._num_examined = 0
        self._stepped: dict[int, torch.optim.Optimizer] = {}  # id -> optimizer, of all optimizers that have stepped
        self._name = f"proof-{next(_numbers)}"  # the same on all ranks
        # The optimizer whose updates are counted; None if the watch has ended.
        self._base: torch.optim.Optimizer | None = None
        self._hook: Any = None
        self._content: dict[str, Any] = {}
        self._known_wrong: str | None = None  # kept here, so that a later error does not hide it
        self._cuts: list[float] = []  # by what clipping divided the gradients, in the watched steps
        self._step_parameters: list[Any] = []  # of the model that the optimizer updates; none under ZeRO
        self._repeated: int | None = None  # the first update that got the gradients of the update before it
        self._of_states: list[str] = []  # findings on the optimizer states with which the last update began
        self._of_epoch: list[tuple[int, str]] = []  # notes on schedules, with their first update at a rate of zero
        self._checked: list[Checked] = []
        # The checks that could not be made. The most important one is that of the optimizer step, until it is reached.
        self._not_checked = [verdicts.NotChecked("the optimizer step", "training ended before it", True)]

    def begin(
        self,
        model: Any,
        optimizer: Any,
        request: Request | None,
        arguments: Any,
        called: Any | None = None,
        num_left: int | None = None,
    ) -> None:
        """Compare the built engine with the request, and wait for the step to check.

        `called` is the module that the script calls, if that is not `model` but the module inside it. None if the
        script calls `model`. `num_left` is the number of updates that the training will still make. None if it is
        unknown, and at most 0 for a Trainer that does not train. Raises KnownFault as `watch` does.
        """
        self._num_updates = self._steps + num_left if num_left and num_left > 0 else None
        remove_earlier(self._output)
        with self._out_of_the_way():
            self._called = model if called is None else called
            self._model = uncompiled(model)
            self._optimizer = engine_optimizer(self._model, optimizer)
            self._facts = read_back(self._model, optimizer)
            if not self._steps:
                self._at_start = of_weights(self._model)
            self._known_wrong, note = mismatch.known_wrong(self._facts)
            self._demands = _demands(self._model, self._facts["engine"], request, arguments)
            self._tell_what_was_built(request, [note] if note else [])
            self._base = base_optimizer(self._optimizer)
            # The hook is for all optimizers. A hook on this one would be copied when a script copies the optimizer.
            self._hook = before_updates(self._before_update)
            if self._steps and not is_compiled(self._called):  # the counted step may be the next one
                self._first = register_module_forward_hook(self._note_first, with_kwargs=True)
            atexit.register(self._end_of_process)
        if self._known_wrong and not self._options.allow_known_bad:
            self._leave()
            raise KnownFault(f"{self._known_wrong}. Install another release, or pass allow_known_bad=True to continue.")

    def _tell_what_was_built(self, request: Request | None, notes: list[str]) -> None:
        """Compare the built engine with the request, and print and write the result.

        A strict proof raises ConfigMismatch if they differ, and Unverified if an explicit request cannot be checked.
        """
        comparison = mismatch.compare_with_request(self._demands, self._facts)
        unchecked: list[str] = []
        if request is not None:
            unchecked = mismatch.not_checkable(
                content_of(request), by_file(request), comparison.unread, self._facts["engine"]
            )
        wrong = findings.missing_processes(requested_processes(), self._facts["world_size"])
        self._content = {
            "made_by": f"zero-study {__version__}, zero_study.prove",
            "built": self._facts,
            "asked": [{"name": d.name, "value": d.value, "source": d.source} for d in self._demands],
            "not_read_back": comparison.unread,
            "known_wrong": [self._known_wrong] if self._known_wrong else [],
            "findings": wrong,
            "not_as_asked": [],
            "notes": [],
            "step": None,
        }
        sources = list(dict.fromkeys(demand.source.partition(" (")[0] for demand in self._demands))
        notes = [*comparison.notes, *mismatch.defaults_worth_knowing(self._demands, self._facts), *notes]
        if is_deepspeed(self._model):
            notes += mismatch.unread_keys(self._model._config._param_dict, self._demands)
        notes += [f"{text.NOT_CHECKED}{line}" for line in unchecked]
        notes += [*self._loaders.notes, *findings.equal_embeddings(inner_module(self._model))]
        lines = [*text.engine_lines(self._facts), text.request_line(sources, comparison.num_agreed)]
        self._loaders.listen()
        self._content["findings"] += (
            [] if self._resumed is None else self._resumed.take(base_optimizer(self._optimizer)) or []
        )
        self._tell(lines, comparison.differences, notes, self._content["known_wrong"])

    def end(self, waits: bool = True) -> None:
        """End the watch, remove all hooks, and print the result, or a message if no step could be examined.

        A strict proof then raises Unverified, too, or TrainingFault if the last steps were wrong. If `waits` is false,
        other ranks may have ended. Further calls have no effect.
        """
        counts, watch = self._base is not None, self._watch
        self._leave()
        if watch is not None:
            with self._out_of_the_way():
                self._tell_end(watch, waits)
        elif counts:
            passes = self._requested_passes()
            reason = f"; the last one had fewer forward passes than the requested {passes}" if self._short else ""
            steps = terminal.count(self._steps, "optimizer step")
            message = f"training ended after {steps}, before a step could be counted{reason}"
            if rank() == 0:
                print(f"proof: not made, {message}", flush=True)
            if self._strict:
                raise Unverified(message)

    def _tell_end(self, watch: Watch, waits: bool) -> None:
        """Print and write the result of the whole training. A strict proof raises an exception."""
        watch.finish(waits)
        new = self._add_found(watch)
        if ended := findings.ended_schedule(watch.zeros, self._steps):
            new += self._add([ended])
        number = self._num_examined + watch.update - watch.first
        self._checked[0] = Checked(number, "optimizer step", "examined or watched")
        notes = [note for zero, note in self._of_epoch if self._steps < zero - 1] + sorted(watch.ranks.notes.values())
        missing = watch.ranks.missing
        notes += [f"{text.NOT_CHECKED}the end of the training on ranks {missing}"] if missing else []
        notes = [note for note in dict.fromkeys(notes) if note not in self._content["notes"]]
        self._content["notes"] += notes
        self._not_checked += self._of_notes(notes)
        self._content["watched"] = watch.summary()
        self._content |= self.verdict.content()
        if rank() == 0 and (watch.update > watch.first or notes):
            steps = f"{number} of {terminal.count(self._steps, 'optimizer step')}"
            result = self._result_line(steps, [], [], watch.share)
            print("", result, *text.finding_lines([], [], [], notes), sep="\n", flush=True)
            self._write()
        self._raise_if_strict(new, [], notes)

    def _add_found(self, watch: Watch) -> list[str]:
        """Add what the watch has found since the last call to the proof, print it, and return it."""
        total = self._options.steps or self._num_updates
        return self._add([
            f"update {step}{f' of {total}' if total else ''}: {line.removesuffix('.')}."
            for _, step, line in watch.ranks.take()
        ])  # fmt: skip

    def _add(self, new: list[str]) -> list[str]:
        """Add findings to the proof, print them, and return them."""
        if new:
            self._content["findings"] += new
            self._content |= self.verdict.content()
            if rank() == 0:
                print("", *text.finding_lines([], new, [], []), sep="\n", flush=True)
                self._write()
        return new

    def _note_first(self, module: torch.nn.Module, arguments: Any, options: Any, _: Any) -> None:
        """Record the inputs of the first forward pass, so that the batches of two steps can be compared."""
        if module is not self._called or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        with self._out_of_the_way(self._let_go):
            self._forget_first()
            self._batches.append(of_batch(arguments, options))

    def _forget_first(self) -> None:
        if self._first is not None:
            self._first.remove()
        self._first = None

    def _end_of_process(self) -> None:
        """End the watch as the process ends, with exit status 3 if a strict proof was not made.

        An exception that is raised in an exit handler would not change the exit status.
        """
        try:
            self.end(waits=getattr(sys, "last_value", None) is None)
        except (Unverified, TrainingFault):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.verdict.status)

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the model states before the counted step's update, or start to observe the next step.

        Called before every update of every optimizer. Updates of other optimizers are only recorded.
        """
        if self._base is not None:
            self._stepped[id(optimizer)] = optimizer
        with self._out_of_the_way(self._let_go):
            if self._step is not None and self._step.states:
                self._step.update.note_before(optimizer)
            if optimizer is not self._base or self._is_same_update():
                if self._watch is not None:
                    self._watch.before_update(optimizer)
                    if optimizer is not self._base:
                        self._watch.note_other(optimizer)
                return
            # A gap between two of DeepSpeed's numbers is an update that it skipped because of an fp16 overflow.
            number, before = self._engine_steps(), self._last
            self._last = number
            self._steps += 1
            is_after_skip = number is not None and before is not None and number != before + 1
            if self._watch is not None:
                loaded = None if self._resumed is None else self._resumed.take(optimizer)
                if loaded is not None:
                    self._watch.forget_states()
                self._watch.begin_update()
                for text_of_load in loaded or ():
                    self._watch.ranks.add(Finding("lost-states", self._steps, text_of_load))
                self._watch.before_update(optimizer)
                self._raise_if_strict(self._add_found(self._watch), [], [])
            if self._step is not None and self._proves(self._step, is_after_skip):
                self._step.update.note_before(optimizer)
                return
            # Two steps are observed, so that their inputs can be compared. If the model is compiled, only the counted
            # step is observed, because an observed step runs without the compiled graphs.
            begins = PROVED_STEP - (1 if is_compiled(self._called) else 2)
            if self._steps >= begins if self._watch is None else self._examines(self._steps + 1):
                self._watch_next_step(optimizer)

    @property
    def _exchange(self) -> str:
        """The name under which ranks exchange their reports. Each examined step has its own."""
        return self._name if self._watch is None else f"{self._name}-{self._steps}"

    def _examines(self, step: int) -> bool:
        """Say whether the user asked for the full check of a later step."""
        last = self._options.steps or self._num_updates
        return step in self._options.thorough or (self._options.examines_last and step == last)

    def _engine_steps(self) -> int | None:
        """Return DeepSpeed's own number of the current step. None for other engines."""
        return self._model.global_steps if is_deepspeed(self._model) else None

    def _is_same_update(self) -> bool:
        """Say whether this call is part of an update that has been counted already.

        DeepSpeed updates once per parameter group or sub-group. An optimizer may call the step of its base class.
        Only the first call counts.
        """
        number, step = self._engine_steps(), self._step
        is_under_way = step is not None and (bool(step.states) or (number is None and step.is_within_last_update))
        is_under_way = is_under_way or (number is None and self._watch is not None and self._watch.is_updating)
        return is_under_way or (number is not None and number == self._last)

    def _proves(self, step: Step, is_after_skip: bool) -> bool:
        """Say whether this is the update of the step to count.

        If it is, record the model states. If it is not, for example because the step contained an evaluation, stop
        observing the step.
        """
        self._batches += step.batches[:1]
        self._note_clipping(step)
        self._step_parameters = step.gradients.parameters
        step.gradients.compare_with_last_update()
        if step.gradients.are_repeated:
            self._repeated = self._repeated or self._steps
        self._of_states = step.last_states.differences() if self._has_fixed_states else []
        counts = self._steps >= PROVED_STEP if self._watch is None else self._examines(self._steps)
        if step.is_whole and counts and not is_after_skip:
            self._short = self._short + 1 if 0 < step.passes.number < self._requested_passes() else 0
            if self._short in (0, SHORT_STEPS):
                step.run_reference()
                step.begin_update(count_states(self._model, self._optimizer))
                return True
        step.close()
        if counts and self._is_compared():  # ranks that count this step must not wait for this rank
            store_exchange.post(self._exchange, self._steps, None)
        return False

    def _watch_next_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._before:
            self._before = of_weights(self._model)
            self._rates = [float(group["lr"]) for group in optimizer.param_groups]
            self._schedules = {
                id(schedule): (schedules.steps_of(schedule), self._steps) for schedule in _schedulers(optimizer)
            }
        assert self._base is not None
        has_states_on_disk = self._facts["offload_optimizer_device"] == "nvme"
        observed = update.Update(self._model, self._optimizer, self._base, has_states_on_disk)
        # Only the next update may be the one to count, so only then the samples are kept.
        may_count = self._makes_reference and self._steps + 1 >= PROVED_STEP
        again = reference.Reference(self._model, self._facts) if may_count else None
        self._step = Step(
            self._called, self._model, self._base, self._facts["device"], observed, self._after_update, again,
            self._agree_on_reference,
        )  # fmt: skip

    def _agree_on_reference(self, reason: str | None) -> bool:
        """Return whether all ranks can compute the gradients of their samples again."""
        if not self._is_compared():
            return reason is None
        number = self._steps if self._engine_steps() is None else self._model.global_steps
        reasons = store_exchange.agree(f"{self._exchange}-reference", number, [reason], list)
        return reasons is not None and all(of_rank == [None] for of_rank in reasons)

    @property
    def _has_fixed_states(self) -> bool:
        """Whether the states of the optimizer are in memory and change only in updates."""
        is_asynchronous = type(self._base).__name__.startswith("ZenFlow")
        return self._facts["offload_optimizer_device"] != "nvme" and not is_asynchronous

    @property
    def _makes_reference(self) -> bool:
        """Whether the gradient of one process is computed: on request, and for small models under DDP."""
        has_hook = bool(getattr(ddp_of(self._model), "_comm_hooks", None))  # which may compress gradients
        is_small = self._facts["num_params"] <= SMALL and self._facts["engine"] == "DDP" and not has_hook
        return self._options.has_reference or (is_small and self._options.may_repeat and self._is_compared())

    def _is_compared(self) -> bool:
        return dist.is_initialized() and dist.get_world_size() > 1

    def _requested_passes(self) -> int:
        """Return how many forward passes a complete step has at least: the requested number, or 1."""
        return mismatch.passes_of_step(self._demands, self._facts) or 1

    def _after_update(self, step: Step) -> None:
        with self._out_of_the_way():
            self._prove(step)

    def _prove(self, step: Step) -> None:
        """Print and write the result of the step, and watch all steps after it."""
        self._step = None
        self._forget_first()
        facts, clipped_at = self._facts, step.clipping.limit
        # Only the step itself shows the precision of an engine that does not name it.
        shows_precision = facts["precision"] is None and step.passes.number > 0
        if shows_precision:
            of_autocast = step.autocast_dtype
            facts["precision"] = (
                precision_of(facts["parameter_dtypes"]) if of_autocast is None else precision_of_autocast(of_autocast)
            )
        shown_demands = [demand for demand in self._demands if shows_precision and demand.name == "precision"]
        comparison = mismatch.compare_with_request(shown_demands, facts)
        differences, notes = mismatch.compare_step_with_request(
            self._demands, facts, step.passes.number, clipped_at, self._short
        )
        of_autocast = step.autocast_dtype
        differences += mismatch.other_products(
            self._demands,
            step.traffic.probe.multiplications,
            None if of_autocast is None else precision_of([dtype_name(of_autocast)]),
        )
        notes += self._notes_of_passes(step)
        faults, remarks, moved = self._find(step)
        faults = [fault for fault in faults if fault not in self._content["findings"]]
        self._content["findings"] = [*self._content["findings"], *faults]
        self._content["step"] = counted = {
            "number": self._steps,
            "forward_passes": step.passes.number,
            "clipped_at": clipped_at,
            "model_states": step.states,
            "collectives": [asdict(issued) for issued in step.traffic.collectives()],
        }
        lines = text.step_lines(counted, moved, facts["precision"] or "an unknown precision", facts["num_params"])
        differences = [*comparison.differences, *differences]
        notes = [*comparison.notes, *notes, *remarks]
        if not self._num_examined:
            del self._not_checked[0]
            self._checked.insert(0, Checked(1, "optimizer step", "examined"))
        self._num_examined += self._watch is None
        result = self._result_line(f"optimizer step {self._steps}", differences, notes)
        self._tell([result], differences, notes, lines_after=lines)
        if self._watch is None:
            self._begin_watch(step)

    def _result_line(
        self, steps: str, differences: Sequence[str], notes: Sequence[str], share: float | None = None
    ) -> str:
        """Return the line of the result, with differences and notes that are not in the proof yet."""
        not_checked = dict.fromkeys(check.what for check in (*self._not_checked, *self._of_notes(notes)))
        num_differences = len(self._content["not_as_asked"]) + len(differences)
        return text.result_line(steps, len(self._content["findings"]), num_differences, list(not_checked), share)

    def _begin_watch(self, step: Step) -> None:
        facts, base = self._facts, self._base
        assert base is not None
        start = Start(
            update=self._steps,
            passes=step.passes.number,
            backwards=step.gradients.num_backwards,
            compares_gradients=facts["engine"] != "DeepSpeed",
            has_masters=findings.has_masters(facts),
            may_sample=self._has_fixed_states,
        )
        known = {fault_id(line).partition("/")[2] for line in self._content["findings"]}
        known |= {implied for kind in known for implied in _IMPLIED.get(kind, ())}
        group = (facts["data_parallel_ranks"] or []) if self._averager and not self._is_alone else []
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        ranks = Ranks(None if self._is_alone or not self._is_compared() else self._name, group, names, known)
        self._watch = Watch(
            self._called,
            self._model,
            self._optimizer,
            base,
            start,
            ranks,
            self._loaders,
            self._options.max_overhead,
            self._options.steps,
        )

    def _notes_of_passes(self, step: Step) -> list[str]:
        notes = []
        if step.passes.without_gradients:
            notes.append(
                f"{step.passes.without_gradients} more forward pass(es) ran without gradients in training mode"
            )
        if is_compiled(self._called):
            notes.append(
                "the model is compiled, but the counted step ran without its compiled graphs, so rounding differs"
            )
        if step.passes.are_in_evaluation_mode and not depends_on_mode(inner_module(self._model)):
            notes.append(
                "the model trains in evaluation mode, so dropout and similar layers are off. Call model.train()"
            )
        return notes

    def _find(self, step: Step) -> tuple[list[str], list[str], str]:
        """Return the faults of the step, notes, and the result of the check of the update.

        They are the same on all ranks if every rank counted the step.
        """
        report: dict[str, Any] = {"findings": []}
        notes: list[str] = []
        of_reference = None if step.reference is None else step.reference.report
        of_update = step.update.report()  # first, because it reads the weights that the update has just changed
        try:
            report = self._report(step, notes)
        except Exception as error:  # the other results of the proof do not depend on it
            notes.append(f"{text.NOT_CHECKED}faults of the step ({type(error).__name__}: {error})")
        if not self._is_compared():
            notes += [*findings.uneven_targets(step.losses.targets), *report.get("unchecked", [])]
            of_loss, of_loss_notes = loss_graph.scaled_loss([report.get("target_weights")])
            report["findings"] += of_loss
            notes += of_loss_notes
            of_norms = norms.judge([report["norm"]], self._facts) if "norm" in report else norms.NormJudgment([], [])
            notes += of_norms.notes
            wrong = report["findings"] + of_norms.findings + self._with_reference([of_reference], notes)
            return self._with_update(wrong, notes, self._judge([of_update]))
        mine = [report, of_update, of_reference] if "ranks" in report else None
        agreed = store_exchange.agree(self._exchange, self._steps, mine, self._decide)
        self._is_alone = agreed is None
        if agreed is None:
            notes.append(
                f"{text.NOT_CHECKED}differences between ranks, because one rank is not watched or counts another step"
            )
            if of_reference is not None and self._options.has_reference:
                notes.append(f"{text.NOT_CHECKED}{REFERENCE} (the ranks were not compared)")
            notes += report.get("unchecked", [])
            return self._with_update(report["findings"], notes, self._judge([of_update]))
        notes += agreed[1]
        of_references = self._with_reference(agreed[3], notes)
        # Another finding is the cause of a wrong gradient.
        wrong = [*agreed[0], *(of_references if self._options.has_reference or not agreed[0] else [])]
        return self._with_update(wrong, notes, update.Judgment(*agreed[2]))

    def _with_reference(self, reports: Sequence[Any], notes: list[str]) -> list[str]:
        """Return findings of the comparison with one process, if it was requested. Appends to `notes`."""
        if not self._makes_reference:
            return []
        is_requested = self._options.has_reference
        result = reference.judge([report or {} for report in reports], self._facts["engine"] != "none", is_requested)
        if not is_requested and not result.num_checked:
            return []
        self._content["reference"] = result.numbers
        self._checked.append(Checked(result.num_checked, "gradient element", "compared with that of one process"))
        if is_requested:
            notes += [f"{text.NOT_CHECKED}{REFERENCE} ({reason})" for reason in result.not_checked]
        notes += result.notes
        return result.findings

    def _decide(self, posted: Sequence[Any]) -> list[Any]:
        """Return the findings, notes and judgment of the update from what all ranks posted."""
        reports, of_updates, of_references = ([entry[i] for entry in posted] for i in (0, 1, 2))
        wrong, notes = findings.check_ranks(reports)
        of_norms = norms.judge([report["norm"] for report in reports], self._facts)
        return [wrong + of_norms.findings, notes + of_norms.notes, self._judge(of_updates), of_references]

    def _judge(self, reports: Sequence[update.UpdateReport]) -> update.Judgment:
        try:
            return update.judge(reports, torch.device(self._facts["device"]))
        except Exception as error:  # the other results of the proof do not depend on it
            return update.Judgment([], [], [f"{type(error).__name__}: {error}"], "not checked", {}, [])

    def _with_update(
        self, wrong: list[str], notes: list[str], judgment: update.Judgment
    ) -> tuple[list[str], list[str], str]:
        """Add the judgment of the update to findings and notes, and to the proof."""
        self._content["update"] = judgment.numbers
        num_checked = judgment.numbers.get("num_checked", 0)
        self._checked.append(
            Checked(num_checked, "parameter", "whose update was compared with the optimizer's formula")
        )
        unchecked = [*judgment.errors, *judgment.not_checked]
        reasons = [f"{text.NOT_CHECKED}{WEIGHTS} ({reason})" for reason in unchecked]
        return [*wrong, *judgment.findings], [*notes, *judgment.notes, *reasons], judgment.summary

    def _report(self, step: Step, notes: list[str]) -> dict[str, Any]:
        """Return this rank's findings in the step for the comparison with other ranks. Appends to `notes`."""
        after = of_weights(self._model)
        unchanged = {name for name, sums in after.items() if sums == self._before.get(name, sums)}
        wrong, untrained = findings.not_trained(self._model, self._optimizer, self._stepped.values(), unchanged)
        wrong = wrong or findings.not_moved(self._model, self._facts, self._optimizer, self._before, after)
        if max(self._rates, default=0.0) > 0:
            wrong += findings.reverted_weights(self._model, self._facts, self._before, step.weights, after)
        wrong += findings.trains_in_evaluation_mode(step, inner_module(self._model))
        wrong += findings.lost_ties(self._model) or ([] if self._ties is None else self._ties.findings())
        cut = step.cuts.names(self._trained())
        wrong += findings.cut_from_graph(cut, len(self._trained())) + step.packing.findings()
        wrong += self._of_states + ([] if self._repeated is None else [findings.repeated_update(self._repeated)])
        num_ranks = len(self._facts["data_parallel_ranks"] or [0])
        wrong += dict.fromkeys(line for loader in self._loaders for line in findings.check_loader(loader, num_ranks))
        of_training, self._of_epoch = self._of_schedules(step)
        wrong += of_training
        notes += [*untrained, *_notes_of_gradients(step.gradients, len(cut))]
        notes += [f"{text.NOT_CHECKED}{reason}" for reason in step.packing.not_checked()]
        notes += findings.hard_clipping(self._cuts, step.clipping.limit or self._facts["gradient_clipping"])
        batches = self._batches[-2:] if len(self._batches) > 1 else step.batches
        report = findings.rank_report(self._model, self._facts, self._optimizer, step, batches, step.weights or after,
                                      self._at_start)  # fmt: skip
        self._averager = report["watched"][-1]
        if self._options.has_reference:  # which finds the same
            report["target_weights"] = None
        report["findings"] = [*wrong, *report["findings"]]
        report["norm"] = norms.report(self._model, step.update.squares, step.update.num_elements)
        return report

    def _trained(self) -> list[Any]:
        """Return the parameters that the optimizer updates, or under ZeRO all trainable parameters of the model."""
        parameters = self._step_parameters or [p for p in self._model.parameters() if p.requires_grad]
        return [p for p in parameters if whole_size(p)]

    def _note_clipping(self, step: Step) -> None:
        """Record by what the gradients of a step were divided. DeepSpeed knows the norm only after its step."""
        limit, norm = self._facts["gradient_clipping"], getattr(self._model, "_global_grad_norm", None)
        if step.clipping.limit is not None:
            self._cuts.append(step.clipping.cut)
        elif is_deepspeed(self._model) and limit and norm is not None:
            self._cuts.append(float(norm) / limit)

    def _of_schedules(self, step: Step) -> tuple[list[str], list[tuple[int, str]]]:
        """Return findings and late notes on learning rate schedules of this optimizer that end too early.

        The rate of their steps is taken from the watched updates.
        """
        lengths = [
            len(loader) for loader in self._loaders if hasattr(loader, "__len__") and loader.batch_sampler is not None
        ]
        wrong, notes = [], []
        for schedule in _schedulers(self._optimizer):
            before, number = self._schedules.get(id(schedule), (0, self._steps))
            if self._steps <= number:
                continue
            steps_a_update = (schedules.steps_of(schedule) - before) / (self._steps - number)
            if self._num_updates is not None:
                wrong += schedules.of_training(schedule, steps_a_update, self._steps, self._num_updates)
            elif lengths:
                updates = max(1, lengths[-1] // max(1, step.passes.number))
                notes += schedules.of_epoch(schedule, steps_a_update, self._steps, updates)
        return wrong, notes

    def _tell(
        self,
        lines: list[str],
        differences: list[str],
        notes: list[str],
        wrong: Sequence[str] = (),
        lines_after: Sequence[str] = (),
    ) -> None:
        """Print and write the proof on rank 0. If it is strict, raise TrainingFault, ConfigMismatch or Unverified.

        Every rank raises the same exception. `lines_after` is printed below the findings.
        """
        findings = self._content["findings"]
        self._content["not_as_asked"] += differences
        self._content["notes"] += notes
        self._not_checked += self._of_notes(notes)
        self._content |= self.verdict.content()
        if rank() == 0:
            # A progress bar may be on the current line.
            finding_lines = text.finding_lines(wrong, findings, differences, notes)
            print("", *lines, *finding_lines, *lines_after, sep="\n", flush=True)
            if self._write() and lines_after:
                print(f"proof: written to {self._output}", flush=True)
        self._raise_if_strict(findings, differences, notes)

    def _raise_if_strict(self, findings: Sequence[str], differences: Sequence[str], notes: Sequence[str]) -> None:
        """If the proof is strict, raise an error for what was found, is not as requested, or was not checked."""
        if self._strict and findings:
            raise TrainingFault(" ".join(findings))
        if self._strict and differences:
            raise ConfigMismatch("; ".join(differences))
        unchecked = [note.removeprefix(text.NOT_CHECKED) for note in notes if note.startswith(text.NOT_CHECKED)]
        if self._strict and unchecked:
            raise Unverified("; ".join(unchecked))

    def _write(self) -> bool:
        """Write the proof on rank 0, and return whether that was possible."""
        if rank():
            return False
        try:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._output.write_text(json.dumps(self._content, indent=1, default=str) + "\n")
        except OSError as error:  # only rank 0 writes, and all ranks must end in the same way
            print(f"proof: not written: {error}", flush=True)
            return False
        return True

    def _of_notes(self, notes: Sequence[str]) -> list[verdicts.NotChecked]:
        """Return the checks that the notes report as not made. A strict proof requests all checks."""
        texts = [note.removeprefix(text.NOT_CHECKED) for note in notes if note.startswith(text.NOT_CHECKED)]
        parts = (line.partition(" (") for line in texts)
        return [
            verdicts.NotChecked(check, reason.removesuffix(")"), self._strict or check.startswith(REQUESTED))
            for check, _, reason in parts
        ]

    @property
    def content(self) -> dict[str, Any]:
        """The proof so far, with the keys of proof.json. Empty until the watch begins."""
        return self._content

    @property
    def verdict(self) -> Verdict:
        """The verdict so far. A difference from the request counts as a finding."""
        kinds = ("known_wrong", "findings", "not_as_asked")
        return Verdict.of(sum(len(self._content.get(kind, [])) for kind in kinds), self._checked, self._not_checked)

    def _let_go(self) -> None:
        """Remove everything except the hook on updates, which has no effect from then on.

        PyTorch fails if a hook removes itself, so this is what hooks call.
        """
        if self._step is not None:
            self._step.close()
        if self._watch is not None:
            self._watch.close()
        self._forget_first()
        self._step = self._base = self._watch = None

    def _leave(self) -> None:
        """Remove all hooks."""
        self._let_go()
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        self._loaders.close()
        atexit.unregister(self._end_of_process)

    @contextmanager
    def _out_of_the_way(self, leave: Callable[[], None] | None = None) -> Iterator[None]:
        """Print an error of the proof itself, so that the training continues.

        If the proof is strict, raise Unverified instead. After an error, `leave` removes the hooks. If it is None,
        `_leave` removes them.
        """
        try:
            yield
        except (ConfigMismatch, Unverified, TrainingFault):
            self._leave()
            raise
        except Exception as error:
            (leave or self._leave)()
            if self._strict:
                raise Unverified(f"not made on rank {rank()}: {type(error).__name__}: {error}") from error
            print(f"proof: not made on rank {rank()}: {type(error).__name__}: {error}. Training continues.", flush=True)


class Loaders:
    """The data loaders over which a script iterates, recorded before the check of the training begins."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._iterations: dict[int, int] = {}  # id of a loader -> how often the script has begun to iterate over it
        self._last: int | None = None  # the id of the last one
        self._of_training: int | None = None
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._stack: ExitStack | None = None

    def listen(self) -> None:
        """Record every data loader over which the script iterates from now on. A second call has no effect."""
        if self._stack is None:
            self._stack = ExitStack()
            self._stack.enter_context(wrap_function(torch.utils.data.DataLoader, "__iter__", self._on_iteration))

    def __iter__(self) -> Iterator[Any]:
        return iter([loader for reference in self._seen.values() if (loader := reference()) is not None])

    def epoch(self) -> int:
        """Return how often the script has begun to iterate over the loader that it used at the first call. 0: never."""
        self._of_training = self._last if self._of_training is None else self._of_training
        return self._iterations.get(self._of_training or 0, 0)

    def close(self) -> None:
        if self._stack is not None:
            self._stack.close()
        self._stack = None

    def _on_iteration(self, call: Any, loader: Any) -> Any:
        self._seen[id(loader)] = weakref.ref(loader)
        self._last = id(loader)
        self._iterations[id(loader)] = self._iterations.get(id(loader), 0) + 1
        return call(loader)


def _notes_of_gradients(gradients: Gradients, num_cut: int) -> list[str]:
    """Return notes on gradients that are zero or missing. `num_cut` missing ones are reported as a fault."""
    notes = []
    if 0 < gradients.num_zero < gradients.number:
        notes.append(f"{gradients.num_zero} of {gradients.number} gradient tensors are all zero")
    if num_missing := gradients.num_missing - num_cut:
        notes.append(f"{num_missing} parameters have no gradient, because the loss does not depend on them")
    return notes


def _schedulers(optimizer: Any) -> list[Any]:
    """Return the learning rate schedules of an optimizer that exist in this process.

    Schedules that are part of another one are left out.
    """
    base = base_optimizer(optimizer)
    alive = [
        schedule for schedule in gc.get_objects() if issubclass(type(schedule), torch.optim.lr_scheduler.LRScheduler)
    ]
    own = [schedule for schedule in alive if unwrapped_optimizer(schedule) is base]
    parts = {id(part) for schedule in own for part in schedules.parts_of(schedule)}
    return [schedule for schedule in own if id(schedule) not in parts]


def remove_earlier(output: Path) -> None:
    """Remove the proof of an earlier run, so that it cannot be mistaken for this run's."""
    if rank() == 0:
        with suppress(OSError):
            output.unlink()


def _demands(model: Any, engine: str, request: Request | None, arguments: Any) -> list[Demand]:
    """Return the requested settings, from the weakest to the strongest source."""
    # If no engine is configured, the launcher's environment means DDP. The script may build another engine by itself.
    demands = [demand for demand in by_launcher() if demand.value != "DDP" or engine in ("DDP", "none")]
    if arguments is not None:
        demands += by_arguments(arguments)
    if request is not None:
        demands += by_file(request)
    prepared = getattr(getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None), "_shared_state", None)
    if is_deepspeed(model) and not (prepared and any(demand.name == "engine" for demand in demands)):
        # Neither a launcher nor accelerate has changed this configuration, so it is what the script requests.
        demands += by_json(model._config._param_dict, "the configuration given to DeepSpeed")
    return demands


def _free(output: Path) -> Path:
    """Return a file name that no earlier proof of this process uses: proof-2.json for the second proof.json."""
    number, free = 1, output.absolute()
    while free in _outputs:
        number += 1
        free = output.absolute().with_stem(f"{output.stem}-{number}")
    _outputs.add(free)
    return output.with_name(free.name)
