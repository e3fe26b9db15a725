"""Check a training script without changing it: `python -m zero_study.prove train.py`.

On several processes: `accelerate launch -m zero_study.prove train.py` or `torchrun -m zero_study.prove train.py`.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import terminal
from ..answers import envelope
from ..engines import scripts
from ..engines.hooks import wrap_function
from ..engines.readback.facts import base_optimizer, inner_module, is_deepspeed
from ..verdict import FOUND, REFUSED, UNKNOWN, Inputs, Verdict
from ..verdict import NotChecked as NotCheckedPart
from . import findings, json_answer
from .checksums import Checksum, of_weights
from .mismatch import ConfigMismatch, KnownFault, TrainingFault, Unverified
from .resuming import Resumed
from .ties import Ties
from .watching import PROVED_STEP, Loaders, Options, StepWatcher, remove_earlier

INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended
BACKWARDS = 8  # passes after which a script without an optimizer has changed its weights by itself, if it does
WRONG = "WRONG: "  # begins a reason for a missing proof that is a fault of the training


def main(words: Sequence[str] | None = None) -> None:
    """Run a script as Python would, and check the training of its models."""
    parser = _Parser("python -m zero_study.prove", allow_abbrev=False, description=__doc__)
    parser.add_argument(
        "--strict", action="store_true", help="Fail if training is wrong, is not as requested, or could not be checked."
    )
    parser.add_argument(
        "--allow-known-bad", action="store_true", help="Continue with a release that is known to train wrongly."
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="Compare the gradients with those that one process without an engine has for the same samples. Every rank "
        "then needs memory for the whole model.",
    )
    parser.add_argument("--steps", type=_steps, metavar="N", help="End the training after N optimizer steps.")
    parser.add_argument(
        "--thorough",
        default="",
        metavar="STEPS",
        help='Repeat the full check of step 3 in these steps, such as "100,1000,last". The last step is known if '
        "--steps or a Trainer sets it.",
    )
    parser.add_argument(
        "--max-overhead",
        type=_share,
        metavar="SHARE",
        help='Watch fewer steps if the checks would take more of the time than this, such as "2%%".',
    )
    parser.add_argument(
        "--json", action="store_true", help="Print the result as JSON, and everything else to standard error."
    )
    given = scripts.parse(parser, words)
    output = _move_output() if given.json else None
    for earlier in (Path("proof.json"), *Path().glob("proof-[0-9]*.json")):
        remove_earlier(earlier)
    thorough = [part for part in given.thorough.split(",") if part]
    options = Options(
        given.strict,
        given.allow_known_bad,
        given.reference,
        given.steps,
        frozenset(int(part) for part in thorough if part != "last"),
        "last" in thorough,
        max_overhead=given.max_overhead,
    )
    pairs = _Pairs(options)
    status: Any = 0
    failure: BaseException | None = None
    try:
        status = _run(given.script, given.arguments)
    except BaseException as error:
        if output is None:
            raise
        failure, status = error, INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    finally:
        pairs.close()
    pairs.end(waits=status in (None, 0))
    result = pairs.verdict()
    if pairs.waiting or not pairs.watchers:
        print(f"proof: not made, {pairs.why_not_made()}", flush=True)
    if not pairs.watchers:
        _write_not_made(result, pairs.why_not_made())
    if given.strict and status in (None, 0):
        status = result.status
    if output is not None and scripts.rank() == 0:
        number = 0 if status is None else status if isinstance(status, int) else 1
        proofs = [watcher.content for watcher in pairs.watchers]
        reason = pairs.why_not_made() if pairs.waiting or not pairs.watchers else None
        with suppress(BrokenPipeError), open(output, "w", encoding="utf-8") as file:
            print(json_answer.of(result, proofs, reason, number).text(), file=file)
    if failure is not None:
        raise failure
    if status not in (None, 0):
        sys.exit(status)


def _steps(text: str) -> int:
    """Read a number of steps, of which the third is the first that can be examined."""
    if int(text) <= PROVED_STEP:
        raise ValueError
    return int(text)


def _share(text: str) -> float:
    """Read a share of the time: 2% or 0.02."""
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < share < 1:
        raise ValueError
    return share


class _Parser(scripts.Parser):
    """A parser that also refuses a command line as JSON, if that is what the command line asks for."""

    def error(self, message: str) -> NoReturn:
        own = itertools.takewhile(lambda word: word.startswith("-"), sys.argv[1:])
        if "--json" in own and scripts.rank() == 0:
            print(envelope.error("prove", "refused", message, REFUSED).text(), flush=True)
        super().error(message)


def _move_output() -> int:
    """Let everything that this process prints go to standard error, and return a descriptor of standard output."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    return output


def proved(program: Callable[[], object], output: Path) -> dict[str, Any]:
    """Run a training program in this process, and return the findings about its training on this rank.

    The result has the texts of the findings (`findings`), those that say that another engine or setting was built than
    the launcher requested (`not_as_requested`), and the number of the examined step (`step`), or None. If there is
    none, `reason` says why. A finding does not end the training, and an error of the program is raised. Rank 0 also
    writes the proof to `output`.
    """
    pairs = _Pairs(Options(allow_known_bad=True, may_repeat=False), output)
    try:
        program()
    finally:
        pairs.close()
    pairs.end()
    steps = [watcher.content["step"]["number"] for watcher in pairs.watchers if watcher.content.get("step")]
    reason = None if steps else pairs.why_not_made() if not pairs.watchers else "training ended before a third step"
    wrong = [reason.removeprefix(WRONG)] if reason and reason.startswith(WRONG) else []
    for watcher in pairs.watchers:
        wrong += [*watcher.content.get("known_wrong", []), *watcher.content.get("findings", [])]
    different = [line for watcher in pairs.watchers for line in watcher.content.get("not_as_asked", [])]
    step = steps[0] if steps else None
    return {"findings": wrong, "not_as_requested": different, "step": step, "reason": reason}


def _run(script: Path, arguments: Sequence[str]) -> Any:
    """Run a script, and return its exit status.

    If the proof ends the training, its message has been printed. The status is then 1, or 3 if something could not be
    checked.
    """
    try:
        scripts.run(script, arguments)
    except SystemExit as end:
        return end.code
    except (TrainingFault, ConfigMismatch, KnownFault) as error:
        terminal.print_error(f"{type(error).__name__}: {error}", "prove")
        return FOUND
    except Unverified as error:
        terminal.print_error(f"not checked: {error}", "prove")
        return UNKNOWN
    return 0


def _write_not_made(result: Verdict, reason: str) -> None:
    """Write that no proof was made, so that a reader of the file sees that nothing was checked."""
    if scripts.rank() == 0:
        content = {"findings": [reason] if result.num_findings else [], "notes": [], "step": None, **result.content()}
        with suppress(OSError):
            Path("proof.json").write_text(json.dumps(content, indent=1) + "\n")


class _Pairs:
    """The optimizers of a script with their models. They are observed from the second step on.

    The first step only shows which pairs there are, because PyTorch allows no new hook within a step.
    """

    def __init__(self, options: Options, output: Path = Path("proof.json")) -> None:
        self.paired: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose model has been found
        self._given = (options, output)
        self.watchers: list[StepWatcher] = []
        self._called: dict[int, torch.nn.Module] = {}
        # Model, the module that the script calls, optimizer.
        self.waiting: list[tuple[Any, Any, torch.optim.Optimizer]] = []
        # Optimizer -> its number of steps.
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._num_steps = 0  # of all optimizers, of which some may be gone
        self._inner: set[int] = set()  # ids of optimizers inside others, such as the one in a ZeroRedundancyOptimizer
        self._num_backwards = 0
        self._at_start: dict[str, Checksum] | None = None  # of the weights of the first model that is called
        self._first: weakref.ref[torch.nn.Module] | None = None  # that model
        self._is_by_hand = False  # the script updates weights without an optimizer
        self._engines: dict[int, Any] = {}  # id -> DeepSpeed engine, which counts the updates that it skips
        self._of_forward: Any = register_module_forward_pre_hook(self._on_forward)
        self._of_step = register_optimizer_step_pre_hook(self._on_step)
        self._loaders = Loaders()
        self._loaders.listen()
        self._ties = Ties()
        self._ties.listen()
        self._resumed = Resumed()
        self._stack = ExitStack()
        self._stack.enter_context(wrap_function(torch.autograd, "backward", self._on_backward))

    def _on_backward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        self._num_backwards += 1
        if self._num_backwards == BACKWARDS and not self._num_steps:
            self._is_by_hand = self._moved()
        return call(*arguments, **options)

    def _moved(self) -> bool:
        """Return whether the weights of the first model have changed."""
        model = None if self._first is None else self._first()
        return model is not None and of_weights(model) != self._at_start

    def why_not_made(self) -> str:
        """Return the reason why the training was not checked.

        It begins with WRONG if the training updated no weight.
        """
        engines = [*self._engines.values(), *_alive("deepspeed.runtime.engine", "DeepSpeedEngine")]
        skipped = [engine for engine in engines if engine.skipped_steps >= engine.global_steps > 0]
        if skipped:
            return (
                f"{WRONG}all {skipped[0].global_steps} optimizer steps were skipped because of an overflow, so no "
                "weight moved"
            )
        if self._num_backwards and not self._num_steps:
            if self._is_by_hand or self._moved():
                return "the weights changed without an optimizer of PyTorch, which prove needs"
            return f"{WRONG}{self._num_backwards} backward passes without an optimizer step, so no weight moved"
        if not self._num_steps:
            return "nothing was trained: there was no backward pass and no optimizer step"
        return "no optimizer made two steps for a model whose forward pass ran"

    def close(self) -> None:
        """Remove all hooks at the end of the script."""
        self.leave()
        self._of_step.remove()
        self._stack.close()
        self._ties.close()
        self._resumed.close()

    def end(self, waits: bool = True) -> None:
        """End all watches. If `waits` is false, other ranks may have ended."""
        for watcher in self.watchers:
            with suppress(Unverified, TrainingFault):  # which the verdict contains
                watcher.end(waits)

    def verdict(self) -> Verdict:
        """Return the verdict on all models of the script."""
        inputs = Inputs()
        for number, watcher in enumerate(self.watchers, 1):
            inputs.end(f"model {number}", watcher.verdict)
        if self.waiting or not self.watchers:
            reason = self.why_not_made()
            is_wrong = not self.watchers and reason.startswith(WRONG)
            inputs.end("the training", Verdict.of(is_wrong, (), [NotCheckedPart("the training", reason, True)]))
        return inputs.verdict()

    def leave(self) -> None:
        """Remove the hook that finds models, until a new optimizer steps. Further calls have no effect."""
        self._called.clear()
        if self._of_forward is not None:
            self._of_forward.remove()
        self._of_forward = None

    def _on_forward(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # a part of a model that is compiled, with this hook in its graph
            return
        if not self._called and not self._num_steps:
            self._at_start, self._first = of_weights(module), weakref.ref(module)
        if not self._called:
            self._loaders.notes += findings.equal_embeddings(inner_module(module))
        self._called[id(module)] = module
        if is_deepspeed(module):
            self._engines[id(module)] = module
        while self.waiting:
            model, called, optimizer = self.waiting.pop(0)
            watcher = StepWatcher(
                *self._given,
                steps_before=self._steps[optimizer],
                loaders=self._loaders,
                ties=self._ties,
                at_start=self._at_start,
                resumed=self._resumed,
            )
            self.watchers.append(watcher)
            arguments, num_left = _of_trainer()
            watcher.begin(model, optimizer, None, arguments, called, num_left)
        if self._steps and min(self._steps.values()) > 2:  # optimizers that take turns have all stepped by then
            self.leave()

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._inner:
            return
        self._inner.add(id(getattr(optimizer, "optim", None)))
        self._resumed.compare(optimizer)
        self._num_steps += 1
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if optimizer in self.paired:
            return
        if self._of_forward is None:  # a new optimizer, as after a restart within the process
            self._of_forward = register_module_forward_pre_hook(self._on_forward)
            return
        pair = model_and_caller(list(self._called.values()), optimizer)
        if pair is not None:
            self.paired.add(optimizer)
            self.waiting.append((*pair, optimizer))


def model_and_caller(called: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> tuple[Any, Any] | None:
    """Return the model whose parameters an optimizer updates, and the module that the script calls.

    The called module is the engine, or the bare module inside it. None if there is no such model.
    """
    ids = set(map(id, called))
    for engine in _alive("deepspeed.runtime.engine", "DeepSpeedEngine"):
        with suppress(ValueError):  # the engine has no optimizer
            # A pipeline engine itself is never called. Its stages are watched as plain modules.
            is_pipeline = any(kind.__name__ == "PipelineEngine" for kind in type(engine).__mro__)
            if not is_pipeline and base_optimizer(engine.optimizer) is optimizer:
                is_bare = id(engine) not in ids and id(engine.module) in ids
                return engine, engine.module if is_bare else engine
    module = owner(called, optimizer)
    wrappers = [wrapper for wrapper in _alive(DistributedDataParallel.__module__, "DistributedDataParallel")
                if module is not None and wrapper.module is module]  # fmt: skip
    return None if module is None else (wrappers[0] if len(wrappers) == 1 else module, module)


def owner(called: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
    """Return the outermost module that the script calls and whose parameters an optimizer updates.

    It is found by its DeepSpeed engine, by its parameters, or because it is the only module. None if there is not
    exactly one candidate.
    """
    within = {id(part) for module in called for part in module.modules() if part is not module}
    roots = [m for m in called if id(m) not in within and any(p.requires_grad for p in m.parameters())]
    engines = [m for m in roots if is_deepspeed(m) and base_optimizer(m.optimizer) is optimizer]
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    owners = engines or [m for m in roots if any(id(p) in updated for p in m.parameters())] or roots
    return owners[0] if len(owners) == 1 else None


def _of_trainer() -> tuple[Any, int | None]:
    """Return the arguments of transformers' Trainer and the number of updates that it will still make.

    Both are None if there is not exactly one Trainer. The number is at most 0 if it does not train.
    """
    trainers = _alive("transformers.trainer", "Trainer")
    if len(trainers) != 1:
        return None, None
    state = trainers[0].state
    return trainers[0].args, state.max_steps - state.global_step


def _alive(module: str, name: str) -> list[Any]:
    """Return all existing objects of a class and its subclasses. Empty if its module has not been imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return (
        [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind)] if kind is not None else []
    )


if __name__ == "__main__":
    main()
