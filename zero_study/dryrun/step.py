"""Take three optimizer steps of a prepared training, and record the third."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from zero_study.dryrun.traced import Part
from zero_study.dryrun.tracker import TensorTracker
from zero_study.engines.readback.facts import base_optimizer, engine_optimizer
from zero_study.engines.readback.states import count_states, engine_tensors

# The third step is steady: ZeRO stage 3 has traced the order of its parameters in the first step, and DDP has rebuilt
# its buckets in the second.
STEADY_STEP = 3


@dataclass(frozen=True)
class Training:
    """A model and an optimizer that an engine has prepared, with the functions that are needed for a step."""

    model: Any
    optimizer: Any  # accelerate's or torch's
    micro_steps: int  # per optimizer step
    compute_loss: Callable[[], Tensor]  # of one micro batch
    backward: Callable[[Tensor], Any]
    # The context of a micro step; the argument says if it is the last one.
    accumulate: Callable[[bool], AbstractContextManager[Any]]
    clip_gradients: Callable[[], Any]
    has_parts: bool = True  # whether the part of every tensor is known, which is not so for DeepSpeed's buckets
    micro_steps_left_out: int = 0  # micro steps that are not run; the calls of the first one are counted for them
    offloads: bool = False  # whether states are offloaded to the host, whose memory is then tracked, too

    @property
    def engine_optimizer(self) -> Any:
        """The optimizer that holds the model states: ZeRO's, or torch's."""
        return engine_optimizer(self.model, self.optimizer)


def train_step(training: Training, after_micro_step: Callable[[], None]) -> None:
    """Take one optimizer step, and call `after_micro_step` after each of its micro steps."""
    for micro_step in range(training.micro_steps):
        is_last = micro_step == training.micro_steps - 1
        with training.accumulate(is_last):
            training.backward(training.compute_loss())
            if is_last:
                training.clip_gradients()
                training.optimizer.step()
                training.optimizer.zero_grad()
        after_micro_step()


def trace_training(prepare: Callable[[], Training]) -> dict[str, Any]:
    """Prepare a training, take three steps, and return the memory and the collectives of the third step.

    The result has these keys:

    * `states`: the bytes of the model states by part, as the update begins
    * `before_bytes`: the bytes of all tensors as the step begins
    * `peak_bytes`: the peak of all tensors in the step
    * `parts`: the bytes at the peak by part (empty for DeepSpeed)
    * `moment`: the part of the step in which the peak is
    * `reserved_bytes`: the GPU memory that each allocator would reserve (empty under offload)
    * `calls`: the collectives of the step, in their order
    """
    tracker = TensorTracker()
    states: list[dict[str, Any]] = []
    peak_before_update = 0
    num_calls: list[int] = []  # the number of calls before the step, and after each of its micro steps
    with tracker:
        training = prepare()

        def before_update(*_: Any) -> None:
            nonlocal peak_before_update
            if states:  # DeepSpeed steps once per group or sub-group
                return
            states.append(count_states(training.model, training.engine_optimizer, tracker.bucket_bytes))
            peak_before_update = tracker.peak
            tracker.assign("buffers", training.model.buffers())
            tensors = engine_tensors(training.model, training.engine_optimizer)
            parts: tuple[Part, ...] = ("communication_buffers", "gradients", "optimizer_states", "parameters")
            for part in parts:
                tracker.assign(part, tensors[part])
            tracker.new_part = "temporary_buffers"

        hook = base_optimizer(training.optimizer).register_step_pre_hook(before_update)
        tracker.replay()
        for _ in range(STEADY_STEP):
            states.clear()
            tracker.new_part = None
            before = tracker.held
            num_calls[:] = [len(tracker.calls)]
            tracker.start_peak()
            train_step(training, after_micro_step=lambda: num_calls.append(len(tracker.calls)))
        hook.remove()
        peak = tracker.peak
    if not states:
        raise RuntimeError(f"no optimizer made an update in step {STEADY_STEP}")
    first_micro_step, step = tracker.calls[num_calls[0] : num_calls[1]], tracker.calls[num_calls[0] :]
    return {
        "states": states[0],
        "before_bytes": before,
        "peak_bytes": peak,
        "parts": tracker.parts_at_peak() if training.has_parts else {},
        "moment": "optimizer step" if peak > peak_before_update else "forward and backward",
        # Offloaded tensors would be counted as if they were on the GPU.
        "reserved_bytes": {} if training.offloads else tracker.reserved(),
        "calls": [asdict(call) for call in first_micro_step * training.micro_steps_left_out + step],
    }
