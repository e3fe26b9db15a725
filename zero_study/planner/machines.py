"""Compare machines for a model: numbers of GPUs of one kind, or all GPUs whose price is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zero_study.errors import Refusal
from zero_study.planner import choose
from zero_study.planner.choose import ENOUGH_FREE, EQUALLY_FAST, FewestGpus, StrategyPrediction
from zero_study.planner.request import Request, find_model
from zero_study.planner.units import unit_of
from zero_study.theory import hardware
from zero_study.theory.gpus import GPUS, Gpu
from zero_study.theory.shapes import ModelShape
from zero_study.verdict import Checked, Verdict

MOST_GPUS = 64  # of a machine, unless the request has a number
NUM_FITTING = 4  # numbers of GPUs of one kind, from the first on which the model fits


@dataclass(frozen=True)
class WholeTraining:
    """The predicted time and price of a whole training, which has many equal steps."""

    tokens: float
    steps: int
    hours: float
    hours_low: float
    hours_high: float | None  # None if there is no upper end
    dollars: float | None  # None if the price of the GPU is not known


def whole_training(option: StrategyPrediction, request: Request) -> WholeTraining | None:
    """Return the time and price of the whole training that a request names, without setup, evaluation and checkpoints.

    None if the request names no length.
    """
    tokens, job, price = request.num_tokens, option.prediction.job, option.prediction.dollars_per_hour
    if tokens is None:
        return None
    steps = math.ceil(tokens / (job.tokens * job.gradient_accumulation_steps * option.prediction.box.num_gpus))
    interval = (option.fastest_seconds, option.seconds, option.slowest_seconds)
    low, middle, high = (steps * seconds / 3600 for seconds in interval)
    dollars = None if price is None else price * middle
    return WholeTraining(tokens, steps, middle, low, None if option.is_rough else high, dollars)


@dataclass(frozen=True)
class Machine:
    """A number of GPUs of one model, with the strategy that is recommended on them."""

    option: StrategyPrediction
    training: WholeTraining | None  # None if the request names no tokens

    @property
    def gpu(self) -> Gpu:
        return self.option.prediction.box.gpu

    @property
    def num_gpus(self) -> int:
        return self.option.prediction.box.num_gpus

    @property
    def is_comfortable(self) -> bool:
        """Whether enough memory stays free without offload."""
        return self.option.has_enough_free and not self.option.offloads

    @property
    def dollars_per_hour(self) -> float | None:
        return self.option.prediction.dollars_per_hour

    @property
    def cost(self) -> float | None:
        """US dollars for the whole training, or for a billion tokens or a million images if its length is unknown.

        None if it is not known.
        """
        if self.training is not None:
            return self.training.dollars
        return unit_of(self.option.shape).dollars(self.option.prediction)

    @property
    def certain_cost(self) -> float:
        """The cost that counts in a comparison. Of several GeForce cards, it is the upper end of the interval.

        Few times of such machines have been published.
        """
        is_uncertain = self.num_gpus > 1 and "GeForce" in self.gpu.torch_name
        ratio = self.option.slowest_seconds / self.option.seconds if is_uncertain else 1.0
        return math.inf if self.cost is None else self.cost * ratio


@dataclass(frozen=True)
class NumbersOfGpus:
    """The numbers of GPUs of one kind on which a model fits, and what each strategy needs."""

    fewest: FewestGpus
    machines: list[Machine]

    @property
    def verdict(self) -> Verdict:
        """The command's verdict: how many strategies were predicted, and whether some number of GPUs is enough."""
        return self.fewest.verdict


def numbers_of_gpus(model: str, request: Request) -> NumbersOfGpus:
    """Find how many GPUs of one kind a model needs. Raises Refusal as `choose.fewest_gpus` does."""
    fewest = choose.fewest_gpus(model, request)
    return NumbersOfGpus(fewest, _of_one_kind(fewest.shape, fewest.request))


def _of_one_kind(shape: ModelShape, request: Request) -> list[Machine]:
    """Return the first numbers of GPUs, among powers of two, on which a model fits, with a strategy for each.

    There are `NUM_FITTING` of them, or more until one has enough free memory without offload.
    """
    found: list[Machine] = []
    for count in choose.GPU_COUNTS:
        if not request.could_run(count):
            continue
        try:
            asked = request.replace(num_gpus=count)
            machine = _on(shape, asked)
        except Refusal:
            continue
        if machine is None:
            continue
        found.append(machine)
        if len(found) >= NUM_FITTING and any(each.is_comfortable for each in found):
            break
    return found


def _on(shape: ModelShape, request: Request, has_offload: bool = True) -> Machine | None:
    """Return the machine of a request with the recommended strategy. None if the model does not fit."""
    options, _ = choose.options_of(shape, request.box(), request, has_offload)
    option = choose.recommend(options)
    return None if option is None else Machine(option, whole_training(option, request))


# ---------------------------------------------------------------- all GPUs with a price


@dataclass(frozen=True)
class Comparison:
    """The machines on which a model fits with enough free memory, sorted by price, and the user's limits."""

    shape: ModelShape
    request: Request
    notes: list[str]
    machines: list[Machine]
    without_price: list[str]  # names of GPUs that were not compared
    budget: float | None  # US dollars
    deadline: float | None  # hours
    enough: Machine | None = None  # the cheapest one with more GPUs that keeps the limits, if none of `machines` does

    @property
    def within_limits(self) -> list[Machine]:
        return [machine for machine in self.machines if self.is_within(machine)]

    def is_within(self, machine: Machine) -> bool:
        """Return whether training on a machine keeps the user's budget and deadline."""
        training = machine.training
        if training is None:
            return True
        if self.budget is not None and (training.dollars is None or training.dollars > self.budget):
            return False
        return self.deadline is None or training.hours <= self.deadline

    @property
    def cheapest(self) -> Machine | None:
        return cheapest(self.within_limits)

    @property
    def fastest(self) -> Machine | None:
        return max(self.within_limits, key=lambda machine: machine.option.total_tokens_per_second, default=None)

    @property
    def verdict(self) -> Verdict:
        checked = [Checked(len(self.machines), "machine", "predicted")]
        return Verdict.of(int(bool(self.machines) and self.cheapest is None), checked)


def cheapest(machines: Sequence[Machine]) -> Machine | None:
    """Return the smallest of the machines that cost as little as the cheapest one, or `EQUALLY_FAST` more."""
    most = (1 + EQUALLY_FAST) * min((machine.certain_cost for machine in machines), default=0.0)
    near = (machine for machine in machines if machine.certain_cost <= most)
    return min(near, key=lambda machine: (machine.num_gpus, machine.certain_cost), default=None)


def compare(
    model: str, request: Request, names: Sequence[str] | None = None, num_gpus: int | None = None,
    budget: float | None = None, deadline: float | None = None,
) -> Comparison:  # fmt: skip
    """Compare time and price of one training on these GPUs, or on all GPUs whose price is known.

    Only strategies without offload are compared, on powers of two up to `MOST_GPUS`, or on `num_gpus`. Machines with
    one GPU, and GPUs without a known machine, are compared within one node, because the network between such nodes is
    not known.

    Raises Refusal if the model is unknown, or if it fits on none of the machines.
    """
    if (budget is not None or deadline is not None) and not (request.tokens or request.examples):
        flag = "--budget" if budget is not None else "--deadline"
        raise Refusal(f"{flag} needs the length of the whole training. Add --tokens, or --examples and --epochs.")
    shape, request, notes = find_model(model, request)
    gpus = [GPUS[name] for name in names] if names else [gpu for gpu in GPUS.values() if gpu.price_per_hour]
    machines = [
        machine for gpu in gpus for machine in _of_gpu(shape, request.replace(gpu=gpu.name), num_gpus)
    ]  # fmt: skip
    machines.sort(key=lambda machine: (machine.cost is None, machine.cost, -machine.option.total_tokens_per_second))
    without = [] if names else [gpu.name for gpu in GPUS.values() if not gpu.price_per_hour]
    if not machines:
        raise Refusal(
            f"{shape.name} leaves less than {100 * ENOUGH_FREE:.0f} % of the memory free on each of these machines "
            "without offload. Name one GPU and a number of GPUs to see what would help."
        )
    comparison = Comparison(shape, request, notes, machines, without, budget, deadline)
    if deadline is None or comparison.within_limits:
        return comparison
    larger = (_larger(comparison, gpu, num_gpus or MOST_GPUS) for gpu in gpus)
    return dataclasses.replace(comparison, enough=cheapest([*filter(None, larger)]))


def _larger(comparison: Comparison, gpu: Gpu, than: int) -> Machine | None:
    """Return the smallest machine with more than `than` GPUs of a kind that keeps the limits.

    None if no machine keeps them.
    """
    request = comparison.request.replace(gpu=gpu.name)
    counts = (count for count in choose.GPU_COUNTS if than < count <= _most(request))
    machines = (machine for count in counts for machine in _of_gpu(comparison.shape, request, count))
    return next((machine for machine in machines if comparison.is_within(machine)), None)


def _most(request: Request) -> int:
    """Return the largest number of GPUs of a request's kind that is rented out as one machine or as a cluster."""
    box = request.box(1)
    # Instances with one GPU are not rented as a cluster with a fast network.
    is_one_node = hardware.has_assumed_host(box) or box.gpus_per_node == 1
    return box.gpus_per_node if is_one_node else choose.GPU_COUNTS[-1]


def _of_gpu(shape: ModelShape, request: Request, num_gpus: int | None) -> Iterator[Machine]:
    """Yield machines with one kind of GPU on which the model fits and leaves enough memory free."""
    most = min(MOST_GPUS, _most(request))
    counts: Iterable[int] = [num_gpus] if num_gpus else [count for count in choose.GPU_COUNTS if count <= most]
    for count in counts:
        try:
            asked = request.replace(num_gpus=count)
            if not choose.could_leave_free(shape, asked, count):
                continue
            machine = _on(shape, asked, has_offload=False)
        except Refusal:  # the GPUs do not fill nodes, or do not divide the batch, or lack the precision
            continue
        if machine is not None and machine.is_comfortable:
            yield machine
