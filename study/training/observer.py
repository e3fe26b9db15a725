"""Measure a run step by step, without disturbing the steps that are timed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from study.records.schema import Collective, Facts, Load, ModelStateBytes, Network, PeakMemory, Proof
from study.training import counters
from study.training.counters import Traffic, energy_joules
from study.training.memory import CpuPeak, PhaseMemory, model_state_bytes, swap_traffic
from study.training.proof import prove_compiled, read_optimizer_dtypes
from zero_study.engines.collective_probe import CollectiveProbe
from zero_study.engines.readback.facts import base_optimizer, engine_optimizer

# Adam's moments exist after the first step, and stage 3 has traced the order of its parameters after the second.
STEADY_FROM = 4


class Observed(Facts):
    """The measurements of one rank so far.

    They include the processes before a resumption, except in the fields that say otherwise.
    """

    probed_steps: list[int]
    model_states: ModelStateBytes | None  # just before the update of the probed step
    resting_states: ModelStateBytes | None  # after the probed step
    collectives: list[Collective] | None
    gradient_dtypes: list[str] | None
    moment_dtypes: list[str] | None
    peaks: dict[str, PeakMemory]
    swap_bytes_read: int  # during the training steps
    swap_bytes_written: int
    energy_joules: float | None  # of the GPU during the training steps
    processor_seconds: float  # since the first step, only in this process
    network: Network | None = None  # traffic of the machine, measured by its first rank, only in this process


class Observer:
    """The measurements of this rank. In one step, it records the collectives, the model states and the live tensors.

    Probes slow their step down. The probed step therefore does not count for the timing, and all other steps run
    without probes. The observer also begins the memory phases of the training steps.
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
        num_steps: int,
        is_compiled: bool,
        counts_network: bool,
    ) -> None:
        self.probed_steps = [] if probed_step is None else [probed_step]
        self.model_states: ModelStateBytes | None = None
        self.resting_states: ModelStateBytes | None = None
        self.collectives: list[Collective] | None = None
        self.proof = proof  # gets the types of gradients and moments once they exist
        self._model = model
        self._optimizer = optimizer
        self._memory = memory
        self._swap_folder = swap_folder
        self._bucket_bytes = bucket_bytes  # measured while DDP was built
        self._is_compiled = is_compiled  # whether the run requests compilation
        self._num_steps = num_steps
        self._steps_done = 0  # steps of the processes before this one
        self._earlier: Observed | None = None
        self._traffic_of_network = Traffic(STEADY_FROM) if counts_network else None
        self.begin()

    def resume_from(self, steps_done: int, earlier: Observed | None) -> None:
        """Continue with the measurements from before the resumption. `earlier` is None if they belong to another run.

        A step that was already probed is not probed again. Otherwise, this process probes a step after the warm-up.
        """
        self._steps_done, self._earlier = steps_done, earlier
        if earlier is not None:
            self._memory.resume_from(earlier.peaks)
        if earlier is None or earlier.collectives is None:
            self.probed_steps = [min(step + steps_done, self._num_steps) for step in self.probed_steps]
            return
        self.probed_steps = earlier.probed_steps
        self.collectives = earlier.collectives
        self.model_states, self.resting_states = earlier.model_states, earlier.resting_states
        dtypes = {"gradient_dtypes": earlier.gradient_dtypes, "moment_dtypes": earlier.moment_dtypes}
        self.proof = self.proof.model_copy(update=dtypes)

    def begin(self) -> None:
        """Start counting disk traffic, energy and processor time. Call this just before the first step."""
        self._traffic, self._energy = swap_traffic(), energy_joules(self._memory.device)
        self._processor, self._box = counters.own_seconds(), counters.read_processors()

    def observed(self) -> Observed:
        """Return the measurements of this rank so far. This is not collective."""
        bytes_read, bytes_written = (now - then for now, then in zip(swap_traffic(), self._traffic, strict=True))
        energy = _sum(energy_joules(self._memory.device), self._energy, sign=-1)
        if self._earlier is not None:
            bytes_read, bytes_written = (
                bytes_read + self._earlier.swap_bytes_read,
                bytes_written + self._earlier.swap_bytes_written,
            )
            energy = _sum(energy, self._earlier.energy_joules)
        return Observed(
            probed_steps=self.probed_steps,
            model_states=self.model_states,
            resting_states=self.resting_states,
            collectives=self.collectives,
            gradient_dtypes=self.proof.gradient_dtypes,
            moment_dtypes=self.proof.moment_dtypes,
            peaks=self._memory.phases(),
            swap_bytes_read=bytes_read,
            swap_bytes_written=bytes_written,
            energy_joules=energy,
            processor_seconds=counters.own_seconds() - self._processor,
            network=None if self._traffic_of_network is None else self._traffic_of_network.network(),
        )

    def load(self, ranks: Sequence[Observed]) -> Load | None:
        """Return the processor load by other processes on this machine, whose own ranks are the first in `ranks`.

        None if an earlier process trained a part of this run, because this process did not measure that part.
        """
        local_ranks = ranks[: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]
        own = sum(rank.processor_seconds for rank in local_ranks)
        return None if self._earlier is not None else counters.load_between(self._box, counters.read_processors(), own)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measure one optimizer step in a `with` block.

        Raises Failed if torch.compile was requested but compiled nothing, or compiled something without a request.
        """
        if self._traffic_of_network is not None:
            self._traffic_of_network.begin_step(number, number - self._steps_done)
        with self._phase(number):
            yield
        self.proof = prove_compiled(self.proof, self._is_compiled)

    @contextmanager
    def _phase(self, number: int) -> Iterator[None]:
        nth = number - self._steps_done  # counted from the start of this process
        steady = [STEADY_FROM, *(probed - self._steps_done for probed in self.probed_steps)]
        if number == 1:
            self._memory.begin("first_step")
        elif nth == min(start for start in steady if start > 0):  # in a run that is too short, this is the last step
            self._memory.begin("steady_steps")
        elif number == 2 or nth == 1:
            self._memory.begin("settling_steps")
        if number not in self.probed_steps:
            yield
            return
        hook = base_optimizer(self._optimizer).register_step_pre_hook(self._before_update)
        on_cpu = self.proof.device == "cpu"
        probe = CollectiveProbe(waits=on_cpu)
        peak = CpuPeak() if on_cpu else None
        with ExitStack() as stack:
            if peak is not None:
                stack.enter_context(peak)
            stack.enter_context(probe)
            yield
        hook.remove()
        self.collectives = [Collective(**asdict(issued)) for issued in probe.issued()]
        self.resting_states = self._states()
        if peak is not None:
            self._memory.note_tensors("steady_steps", peak)

    def _before_update(self, *_: Any) -> None:
        """Measure gradients and states just before the optimizer's update, when all of them exist."""
        if self.model_states is None:  # DeepSpeed calls this once per group or sub-group
            self.model_states = self._states()
            self.proof = read_optimizer_dtypes(self.proof, self._model, self._optimizer)

    def _states(self) -> ModelStateBytes:
        optimizer = engine_optimizer(self._model, self._optimizer)
        return model_state_bytes(self._model, optimizer, self._swap_folder, self._bucket_bytes)


def _sum(first: float | None, second: float | None, sign: int = 1) -> float | None:
    """Return first + sign * second. None if one of them is None."""
    return None if first is None or second is None else first + sign * second
