"""What does one run see of itself, step by step, without disturbing what it times?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from study.records.schema import Collective, ModelStateBytes, Proof
from study.training.measure.communication import CollectiveProbe
from study.training.measure.memory import CpuPeak, PhaseMemory, model_state_bytes
from study.training.proof import base_optimizer, innermost, read_optimizer_dtypes

# Adam's moments exist after the first step, and stage 3 has traced the order of its parameters after the second.
STEADY_FROM = 4


class Observer:
    """Probes one designated step for collectives, model states and live tensors, and tells the phases apart.

    Probes slow their step down, so timing leaves it out; every other step runs without any.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        memory: PhaseMemory,
        proof: Proof,
        probed_step: int | None,
        swap_folder: Path | None,
        bucket_bytes: int | None,
    ) -> None:
        self.probed_steps = [] if probed_step is None else [probed_step]
        self.model_states: ModelStateBytes | None = None  # this rank's, as the probed step is about to update
        self.resting_states: ModelStateBytes | None = None  # this rank's, after the probed step
        self.collectives: list[Collective] | None = None
        self.proof = proof  # with the types of gradients and moments, once they exist
        self._model = model
        self._optimizer = optimizer
        self._memory = memory
        self._swap_folder = swap_folder
        self._bucket_bytes = bucket_bytes  # of DDP, as measured when it was built

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surround one optimizer step."""
        if number == 1:
            self._memory.begin("first_step")
        elif number == min([STEADY_FROM, *self.probed_steps]):  # a run too short to be steady: its last step
            self._memory.begin("steady_steps")
        elif number == 2:
            self._memory.begin("settling_steps")
        if number not in self.probed_steps:
            yield
            return
        hook = base_optimizer(self._optimizer).register_step_pre_hook(self._before_update)
        probe = CollectiveProbe()
        peak = CpuPeak() if self.proof.device == "cpu" else None
        with ExitStack() as stack:
            if peak is not None:
                stack.enter_context(peak)
            stack.enter_context(probe)
            yield
        hook.remove()
        self.collectives = probe.collectives()
        self.resting_states = self._states()
        if peak is not None:
            self._memory.note_tensor_bytes("steady_steps", peak.tensor_bytes)

    def _before_update(self, *_: Any) -> None:
        """Look at gradients and states when all are there: just before the optimizer's arithmetic."""
        if self.model_states is None:  # DeepSpeed steps once per group or sub-group; the first time is enough
            self.model_states = self._states()
            self.proof = read_optimizer_dtypes(self.proof, self._model, self._optimizer)

    def _states(self) -> ModelStateBytes:
        return model_state_bytes(self._model, innermost(self._optimizer), self._swap_folder, self._bucket_bytes)
