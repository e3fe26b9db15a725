"""Watch every optimizer step of a training after the one that was examined, and find what goes wrong later.

Each rank counts forward passes, backward passes and updates, and reads weights and gradients at each update. Models
that are too large for that are read in turns. No collective is added (ranks.py), and a tensor on a GPU is copied to the
host only when facts are posted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .. import terminal
from ..engines.readback.dtypes import dtype_name
from ..engines.readback.facts import engine_kind, inner_module, is_deepspeed, replicated_names
from ..engines.step_recorder import StepRecorder
from . import batches
from .checksums import bits
from .proved_step import depends_on_mode
from .ranks import Facts, Finding, Ranks
from .sampled import SampledUpdates

# In how many turns a rank reads its weights and gradients, one turn per update. A turn has at least so many bytes, and
# at most so many parameters.
TURNS = 8
BYTES_ON_CPU, BYTES_ON_GPU = 2**23, 2**28
MOST_TENSORS = 128
EVERY_ON_GPU = 8  # updates; comparing one with the formula waits for the GPU
POST_STEPS, POST_SECONDS = 16, 5.0  # facts are posted after so many updates, or so much time
LONGEST_STRIDE = 1024  # updates of which one is read, if checks must take little time
TOO_LONG = 4  # times as many backward passes without an update as in any step before
MOVES_IN = 12  # updates within which a parameter should change
GROWS = 10.0  # Factors of a learning rate or a clipping limit. A larger change gets a note.


class Start(NamedTuple):
    """What is known when a watch begins, from the step that was examined."""

    update: int  # the number of that step
    passes: int  # its forward passes with gradients
    backwards: int  # its backward passes
    compares_gradients: bool  # whether .grad has averaged gradients when an update begins
    has_masters: bool  # whether the optimizer has other tensors than the model
    may_sample: bool  # whether the states of the optimizer are in memory


class _Part(NamedTuple):
    """A trained parameter that is read in its turn."""

    number: int
    name: str
    parameter: Any
    is_replicated: bool  # every rank of the group has the same values


class _Read(NamedTuple):
    """What was read of a parameter at an update."""

    part: _Part
    weight: torch.Tensor
    gradient: torch.Tensor | None


class Watch:
    """The facts of one rank about every update, from the examined step to the end of the training."""

    def __init__(
        self, called: Any, model: Any, optimizer: Any, base: torch.optim.Optimizer, start: Start, ranks: Ranks,
        loaders: Any, most: float | None, last: int | None,
    ) -> None:  # fmt: skip
        """Begin to watch. `optimizer` holds the model states, and `base` does the arithmetic.

        `loaders` counts the epochs. `most` is the share of the time that checks may take.
        `last` is the update after which the script is ended, or None.
        """
        self.ranks = ranks
        self.seconds = 0.0  # that the checks took
        self.num_bytes = self.num_read = self.num_sampled = 0  # bytes; updates; parameters compared with the formula
        self._began = self._posted_at = self._last_time = time.perf_counter()
        self._model, self._base, self._start, self._most, self._last = model, base, start, most, last
        self._loaders = loaders
        self.first = self.update = start.update  # the numbers of the examined update and of the last one
        self._backwards = self._all_backwards = 0  # since the last update: of the model, and of any model
        self._windows = [min(start.passes, start.backwards)]  # the backward passes of the last steps
        self._longest = max(1, *self._windows)
        self._kinds: set[int] = set()  # the numbers of backward passes of all steps but the last
        self._is_updating = self._has_failed = False
        self._num_skipped = 0  # updates that a GradScaler skipped
        self._has_modes = depends_on_mode(inner_module(model))
        self._passes = {True: 0, False: 0}  # forward passes with gradients since the last update, by training mode
        self._num_dropped = 0  # forward passes without gradients in training mode
        self._rows: list[tuple[int, torch.Tensor]] = []  # of the current step, each with the epoch
        self._losses: list[torch.Tensor] = []
        self._norm: Any = None  # by which all gradients were clipped, if that happened once
        self._num_clippings = 0  # since the last update
        self._limit: float | None = None
        self._rate = _rate(base)  # the largest so far
        self._last_rate = start.update  # the last update with a rate above zero
        self._order = batches.Order()
        self._pending: dict[int, tuple[list[_Read], list[tuple[int, torch.Tensor]], list[torch.Tensor], Any]] = {}
        self._findings: list[Finding] = []
        self._bits: dict[str, tuple[int, int, bool]] = {}  # name -> bits, their first update, whether it had a gradient
        self._last_read = start.update
        self._stride = 1
        self._turns, self._device = self._in_turns()
        self._parameters = {part.name: part.parameter for turn in self._turns for part in turn}
        self._ids = set(map(id, self._parameters.values()))
        self._smallest: Any = min(self._parameters.values(), key=lambda p: int(p.numel()), default=None)
        self._left: tuple[int, int] | None = None  # the state of its gradient after the last backward pass
        self._in_window = 0  # backward passes since gradients were erased
        self._has_trained = False  # in training mode
        self._is_replaced = False  # another optimizer updates the same parameters
        self._sampled = SampledUpdates(model, optimizer, base) if start.may_sample else None
        self._samples_every = 1 if self._device == "cpu" else EVERY_ON_GPU
        self._recorder = StepRecorder(called, model, base)
        self.listen()

    def listen(self) -> None:
        """Begin to watch, or continue after `close`."""
        self._recorder.listen(
            forward=self._on_forward,
            backward=self._on_backward,
            clipping=self._on_clipping,
            scaler_step=self._on_scaler,
            update=self._on_update,
            engine_step=self._on_engine_step,
        )

    def _in_turns(self) -> tuple[list[list[_Part]], str]:
        """Return the parameters that are read together, and the type of their device."""
        replicated = set() if engine_kind(self._model) == "FSDP1" else replicated_names(self._model)
        trained = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        device = trained[0][1].device.type if trained else "cpu"
        sizes, size = [2 * p.numel() * p.element_size() for _, p in trained], 0
        most = max(BYTES_ON_CPU if device == "cpu" else BYTES_ON_GPU, -(-sum(sizes) // TURNS))
        turns: list[list[_Part]] = [[]]
        for number, ((name, p), num_bytes) in enumerate(zip(trained, sizes, strict=True)):
            if turns[-1] and (size + num_bytes > most or len(turns[-1]) >= MOST_TENSORS):
                turns.append([])
                size = 0
            turns[-1].append(_Part(number, name, p, name in replicated))
            size += num_bytes
        return turns, device

    @property
    def share(self) -> float:
        """The share of the time since the watch began that its checks took on this rank's host."""
        return self.seconds / max(1e-9, self._last_time - self._began)

    def close(self) -> None:
        """Remove all listeners. Further calls have no effect."""
        self._recorder.close()

    def summary(self) -> dict[str, Any]:
        """Return what the watch has done on this rank, for proof.json."""
        return {
            "steps": [self.first + 1, self.update],
            "steps_with_weights_read": self.num_read,
            "steps_in_which_all_weights_are_read_once": len(self._turns) * self._stride,
            "steps_compared_between_ranks": self.ranks.num_compared,
            "parameters_compared_with_formula": self.num_sampled,
            "bytes_read": self.num_bytes,
            "messages": self.ranks.num_messages,
            "characters_sent": self.ranks.num_characters,
            "seconds": self.seconds,
            "share_of_time": self.share,
        }

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                yield
        except Exception as error:  # the training continues
            self.close()
            self._has_failed = True
            self._note("failed", f"not checked: steps after update {self.update} ({type(error).__name__}: {error})")
        finally:
            self.seconds += time.perf_counter() - begin

    def _find(self, kind: str, update: int, text: str) -> None:
        self._findings.append(Finding(kind, update, text))

    def _note(self, kind: str, text: str) -> None:
        self.ranks.notes.setdefault(kind, text)

    # ------------------------------------------------------------ listeners

    def _on_forward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        is_training = inner_module(self._model).training
        if self.update == self._last and torch.is_grad_enabled():
            raise SystemExit(0)
        if not torch.is_grad_enabled():
            self._num_dropped += is_training
        else:
            self._passes[is_training] += 1
            if not (self.update + 1) % self._stride and not torch.compiler.is_compiling():
                with self._timed():
                    rows = batches.hashes((arguments, options))
                    if rows is not None:
                        self._rows.append((self._loaders.epoch(), rows))
        return call(*arguments, **options)

    def _on_backward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        before = self._state_of_gradient()
        if before is None or (before != self._left and not self._has_gradient()):  # erased since the last pass
            self._in_window, self._losses = 0, []
        tensors = arguments[0] if arguments else options.get("tensors")
        self._losses += [tensor.detach() for tensor in _listed(tensors) if tensor.numel() == 1]
        self._all_backwards += 1
        result = call(*arguments, **options)
        self._left = self._state_of_gradient()
        passes = self._passes[True] or (0 if self._has_trained else self._passes[False])
        # Other backward passes belong to other models, or to an evaluation.
        if self._backwards < passes and (self._left != before or self._left is None):
            self._backwards += 1
            self._in_window += 1
        return result

    def _state_of_gradient(self) -> tuple[int, int] | None:
        """Return what changes if a backward pass adds to the smallest parameter. None if an engine keeps gradients."""
        gradient = None if self._smallest is None else self._smallest.grad
        return None if gradient is None else (id(gradient), int(gradient._version))

    def _has_gradient(self) -> bool:
        """Return whether the smallest gradient is not zero. On a GPU it counts as zero: reading it would wait."""
        return self._device == "cpu" and self._smallest is not None and bool(self._smallest.grad.any())

    def _on_clipping(
        self, call: Any, clipped: Any, max_norm: float, total_norm: Any, *arguments: Any, **options: Any
    ) -> Any:
        parameters = _listed(clipped)
        ids = set(map(id, parameters))
        if math.isfinite(max_norm) and self._ids & ids:
            self._num_clippings += 1
            # The norm of a sharded gradient is a part of the norm on each rank, until the ranks add it up. Clipping by
            # parts or by samples may come before the reduction.
            is_whole = self._num_clippings == 1 and self._ids <= ids and not hasattr(total_norm, "full_tensor")
            self._norm = total_norm if is_whole else None
            self._compare_limit(float(max_norm))
        return call(parameters, max_norm, total_norm, *arguments, **options)

    def _compare_limit(self, limit: float) -> None:
        before, self._limit = self._limit, limit
        if before is not None and not before / GROWS < limit < before * GROWS:
            self._note(
                "limit", f"gradients are clipped at {limit:g} from update {self.update + 1}, before at {before:g}"
            )

    def _on_scaler(self, call: Any, scaler: Any, *arguments: Any, **options: Any) -> Any:
        before = self.update
        result = call(scaler, *arguments, **options)
        if self.update == before and self._backwards:
            self._num_skipped += scaler.is_enabled()
            self._begin_step()
        return result

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Sample an update that begins. DeepSpeed updates in several calls."""
        if self._sampled is not None and not self._has_failed:
            with self._timed():
                is_sampled = not self.update % (self._stride * self._samples_every)
                for text in self._sampled.before(optimizer, is_sampled):
                    self._find("reset-states", self.update, text)

    def note_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an update of another optimizer, which may train the same parameters from then on."""
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self._smallest is not None and id(self._smallest) in updated:
            self._is_replaced = True

    def forget_states(self) -> None:
        """Accept that the states of the optimizer are others than the last update left, because they were loaded."""
        if self._sampled is not None:
            self._sampled.forget()

    def begin_update(self) -> None:
        """Record the facts of the step whose update begins. Called once per update, before `before_update`."""
        if self._has_failed:
            return
        with self._timed():
            self.update += 1
            self._is_updating, self._last_time = True, time.perf_counter()
            self._count_passes()
            self._compare_rates()
            reads = [] if self.update % self._stride else self._read()
            self._pending[self.update] = reads, self._rows, self._losses, self._norm
            self._begin_step()
            self._thin_out()
            if (
                len(self._pending) >= POST_STEPS
                or time.perf_counter() - self._posted_at > POST_SECONDS
                or self._findings
            ):
                self.post()

    @property
    def is_updating(self) -> bool:
        """Whether an update has begun that is not over. An optimizer may call the step of its base class."""
        return self._is_updating and not self._has_failed

    def _begin_step(self) -> None:
        self._rows, self._losses, self._norm = [], [], None
        self._passes, self._backwards, self._all_backwards = {True: 0, False: 0}, 0, 0
        self._num_clippings = self._in_window = 0

    def _on_update(self, call: Any, *arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        self._is_updating = False
        if not is_deepspeed(self._model):
            self._end_update()
        return result

    def _on_engine_step(self, call: Any, *arguments: Any, **options: Any) -> Any:
        is_boundary = self._model.is_gradient_accumulation_boundary()  # the step counts on
        result = call(*arguments, **options)
        if is_boundary:
            self._end_update()
            self._begin_step()  # also after an update that DeepSpeed skipped
            self._is_updating = False
        return result

    def _end_update(self) -> None:
        if self._sampled is not None:
            with self._timed():
                texts, number = self._sampled.after()
                self.num_sampled += number
                for text in texts:
                    self._find("other-update", self.update, text)

    # ------------------------------------------------------------ the facts of a step

    def _count_passes(self) -> None:
        """Compare the forward and backward passes of the step with those of earlier steps."""
        number, update = self._in_window, self.update
        self._has_trained = self._has_trained or self._passes[True] > 0
        if not self._all_backwards and self._start.backwards:
            self._find("repeated-update", update, "the same gradients are used twice: no backward pass was made since "
                       "the update before. Call optimizer.step() once per batch")  # fmt: skip
        if self._passes[False] and not self._passes[True] and self._has_modes:
            self._find("evaluation-mode", update, "the model trains in evaluation mode, so dropout is off and batch "
                       "norm is fixed. Call model.train() after an evaluation")  # fmt: skip
        *before, last = self._windows[-4:]
        if len(before) == 3 and self._kinds == {number} and last > number > 0:
            self._find("carried-gradients", update - 1, (
                f"the update used the gradients of {last} backward passes, and those before and after it of {number}. "
                "Look for a window of accumulation that ended without an update"
            ))  # fmt: skip
        if 0 < number < last and len({*before, last}) == 1:
            self._note("short", f"update {update} used {number} backward passes, and updates before it {last}. If each "
                       f"loss is divided by {last}, this update is too small")  # fmt: skip
        self._kinds |= {last}  # before the last step, whose length may be an exception
        self._windows = [*self._windows[-4:], number]
        self._longest = max(self._longest, number)

    def _compare_rates(self) -> None:
        rate = _rate(self._base)
        if rate > 0:
            self._last_rate = self.update
        if self._rate and rate > GROWS * self._rate:
            self._note("rate", f"the learning rate rose from {self._rate:.3g} to {rate:.3g} in update {self.update}")
        self._rate = max(rate, self._rate)

    def _read(self) -> list[_Read]:
        """Read the parameters whose turn it is, and their gradients."""
        if self._device == "cuda" and torch.cuda.is_current_stream_capturing():
            return []
        reads = []
        for part in self._turns[self.update // self._stride % len(self._turns)]:
            p = part.parameter
            weight, gradient = bits(p), None if p.grad is None else bits(p.grad)
            if weight is not None:
                reads.append(_Read(part, weight, gradient))
                self.num_bytes += p.element_size() * p.numel() * (1 if gradient is None else 2)
        self.num_read += bool(reads)
        return reads

    def _thin_out(self) -> None:
        """Read fewer updates if the checks take too long. All ranks read the multiples of the longest stride."""
        if self._most is not None and self.update % self._stride == 0:
            if self.share > self._most:
                self._stride = min(2 * self._stride, LONGEST_STRIDE)
            elif self._stride > 1 and self.share < self._most / 4:
                self._stride //= 2

    # ------------------------------------------------------------ what follows from the facts

    def post(self, ended: bool = False) -> None:
        """Judge this rank's facts, post them, and take over what rank 0 has found."""
        facts = {update: self._facts(update, *pending) for update, pending in self._pending.items()}
        self._pending = {}
        if ended:
            self._find_at_end()
        findings, self._findings = self._findings, []
        self.ranks.notes |= {kind: text for kind, text in self._order.notes.items() if kind not in self.ranks.notes}
        self.ranks.post(facts, findings, self.update if ended else None)
        self.ranks.receive()
        self._posted_at = time.perf_counter()

    def _facts(
        self, update: int, reads: list[_Read], rows: list[tuple[int, torch.Tensor]], losses: list[Any], norm: Any
    ) -> Facts:
        gradients = [entry.gradient for entry in reads if entry.gradient is not None]
        values = iter(_numbers([entry.weight for entry in reads] + gradients))
        weights = {entry.part: next(values) for entry in reads}
        of_gradients = {entry.part: next(values) for entry in reads if entry.gradient is not None}
        for part, value in weights.items():
            before = self._bits.get(part.name)
            since = update if before is None or before[0] != value else before[1]
            self._bits[part.name] = value, since, bool(of_gradients.get(part))
            self._last_read = update
        for value in _numbers(losses):
            if not math.isfinite(value):
                self._find("not-finite-loss", update, (
                    f"the loss is not finite ({value}). Look for a division by zero, for a batch without targets, and "
                    "for a learning rate that is too high"
                ))  # fmt: skip
        of_step: list[int] = []
        for epoch, tensor in rows:
            of_batch = tensor.tolist()
            self._order.add(update, of_batch, epoch)
            of_step += of_batch
        return Facts(
            {str(part.number): value for part, value in weights.items() if part.is_replicated},
            {str(part.number): value for part, value in of_gradients.items() if self._compares_gradient(part)},
            None if norm is None else float(norm),
            of_step[: batches.MOST_ROWS],
            rows[0][0] if rows else 0,
            not any(of_gradients.values()) if of_gradients else None,
        )

    def _compares_gradient(self, part: _Part) -> bool:
        return part.is_replicated and self._start.compares_gradients

    def _find_at_end(self) -> None:
        """Judge what is known only at the end of the training."""
        if self._backwards > TOO_LONG * self._longest and not self._is_replaced:
            self._find("missing-update", self.update + 1, (
                f"the optimizer makes no step any more: {self._backwards} backward passes followed update "
                f"{self.update}, and no step before had more than {self._longest}. Look for a condition that skips "
                "the step"
            ))  # fmt: skip
        elif self._backwards and not self._is_replaced:
            self._note("left", f"the last {terminal.count(self._backwards, 'backward pass', 'backward passes')} of the "
                       "training had no update")  # fmt: skip
        if self._num_skipped:
            self._note("skipped", f"GradScaler skipped {terminal.count(self._num_skipped, 'update')} because of an "
                       "overflow")  # fmt: skip
        if self._num_dropped and self._has_modes:
            self._note("dropped", f"{terminal.count(self._num_dropped, 'forward pass', 'forward passes')} without "
                       "gradients ran in training mode, with dropout or batch norm's training statistics")  # fmt: skip
        if self._sampled is not None and self._start.backwards:
            self.ranks.notes |= self._sampled.notes
        self._find_unmoved()

    def _find_unmoved(self) -> None:
        """Report parameters that have not changed for some updates although their learning rate is not zero."""
        most = MOVES_IN * self._stride * len(self._turns)
        still = [name for name, (_, since, _) in self._bits.items() if self._last_read - since >= most]
        if not still or self._start.has_masters or self._last_rate < self.update:
            return
        since = min(self._bits[name][1] for name in still)
        with_gradient = [name for name in still if self._bits[name][2]]
        halves = [name for name in with_gradient if self._parameters[name].element_size() == 2]
        reason = (
            f"their updates are smaller than the precision of {dtype_name(self._parameters[halves[0]].dtype)}"
            if len(halves) == len(still)
            else "they get no gradient"
            if not with_gradient
            else "look for a learning rate of zero, and for weights that are put back"
        )
        self._note("unmoved", f"{len(still)} of {len(self._bits)} parameters have not changed since update {since}, "
                   f"for example {still[0]}: {reason}")  # fmt: skip
        if len(still) == len(self._bits) and with_gradient:
            self._find("no-weight-moved", since, "no weight moved from this update on")

    def finish(self, waits: bool) -> None:
        """Post the last facts, and agree with all ranks on the result. Call it once, on every rank.

        If `waits` is false, other ranks may have ended.
        """
        self.close()
        self.post(ended=True)
        self.ranks.finish(waits)

    @property
    def zeros(self) -> int:
        """The number of updates at the end whose learning rate was zero."""
        return self.update - self._last_rate


def _rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the largest learning rate of an optimizer. A rate on a GPU counts as 1, because reading it would wait."""
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    return max(
        (1.0 if isinstance(r, torch.Tensor) and r.device.type != "cpu" else float(r) for r in rates), default=0.0
    )


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else [t for t in tensors or () if isinstance(t, torch.Tensor)]


def _numbers(tensors: list[torch.Tensor]) -> list[Any]:
    """Return the values of tensors of one element. Those of one device are copied to the host together."""
    places = {(tensor.device, tensor.dtype) for tensor in tensors}
    if len(places) == 1 and tensors[0].device.type != "cpu":
        return torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()  # type: ignore[no-any-return]
    return [tensor.item() for tensor in tensors]
