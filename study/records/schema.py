"""The schema of record.json and outcome.json. These files are written atomically and read strictly.

A record holds raw facts of one run, and nothing that is derived from several runs. Unknown values are null.
`steps.jsonl`, in the same folder, has one line per optimizer step, and the record holds the digest of that file. In a
folder of collected runs, each run is one line of a file instead (`find.py`).
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from study.config import RunConfig
from study.records.laboratory import LABORATORY, bits_per_second
from study.records.simulation import SIMULATED, is_simulated
from zero_study import files
from zero_study.engines.strategy_names import OffloadDevice
from zero_study.errors import Refusal, refusing

SCHEMA_VERSION: Literal[1] = 1
UNKNOWN_BOX = "unknown machine"  # the name of hardware that a record does not describe
READ = "read"  # pydantic's validation context if the facts come from a file
DIGEST = "record_sha256"  # a key of record.json: the digest of all its other facts; records before 2026-11-23 lack it


class Facts(BaseModel):
    """The base class of everything that the study writes to a JSON file. Unknown keys and NaN are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


Kind = TypeVar("Kind", bound=Facts)


def _moment(text: str) -> str:
    if datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"started_at={text!r} has no time zone, so it cannot be compared with another time")
    return text


Timestamp = Annotated[str, AfterValidator(_moment)]  # in ISO 8601 format, with a time zone
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]
Name = Annotated[str, AfterValidator(lambda name: files.check_name(name, "the name"))]


class Sharding(Facts):
    """The sharding of a model by PyTorch (FSDP2), as read from the sharded modules."""

    units: dict[str, int]  # classes of the modules that are gathered together, joined by "+" -> number of such groups
    reshard_after_forward: bool  # whether blocks free their gathered parameters after the forward pass
    sharded_parameters: int  # number of parameters that are shards over the mesh
    unsharded_parameters: int
    mesh: list[int]  # numbers of ranks: [shards], or [replicas, shards]
    compute_dtypes: list[str]  # dtypes of the gathered parameters that are multiplied
    reduce_dtypes: list[str]  # dtypes in which gradients are reduced
    offloads: bool  # whether shards, their gradients and the optimizer's states are on the host


class Proof(Facts):
    """The settings of the engine, as the engine itself reports them after `prepare`.

    They show what the engine really does, whatever was requested. The bytes of model states are in
    `Record.model_state_bytes`.
    """

    world_size: int
    distributed_type: str
    backend: str | None = None  # None: no process group
    device: str
    engine_class: str
    optimizer_class: str  # the optimizer that does the arithmetic, inside all wrappers
    zero_optimizer_class: str | None = None  # DeepSpeed's optimizer that wraps it; None: stage 0, or not DeepSpeed
    zero_stage: int | None = None  # None: not DeepSpeed
    sharding: Sharding | None = None  # None: not FSDP2
    offload_optimizer_device: OffloadDevice = "none"
    offload_param_device: OffloadDevice = "none"
    swap_folder: str | None = None
    # 0: no clipping; outside DeepSpeed, the study's training loop clips, and this is its value
    gradient_clipping: float
    gradient_accumulation_steps: int
    micro_batch_size: int
    precision: str
    autocast_dtype: str | None = None
    # Dtype in which DeepSpeed accumulates gradients over micro batches; None: the gradients' own dtype.
    accumulation_dtype: str | None = None
    parameter_dtypes: list[str]
    gradient_dtypes: list[str] | None = None  # of the gradients that the optimizer reads
    master_dtypes: list[str] | None = None  # None: there are no separate master weights
    moment_dtypes: list[str] | None = None
    gradient_as_bucket_view: bool | None = None  # None: not DDP, or a record from before DDP's buckets were measured
    overlap_comm: bool | None = None
    reduce_bucket_size: int | None = None  # elements
    allgather_bucket_size: int | None = None  # elements
    prefetch_bucket_size: int | None = None  # elements
    param_persistence_threshold: int | None = None  # elements
    max_live_parameters: int | None = None  # elements
    max_reuse_distance: int | None = None  # elements
    use_multi_rank_bucket_allreduce: bool | None = None
    sub_group_size: int | None = None  # elements; records from before 2026-11-20 lack it
    # Number of ranks that share a second copy of the parameters; 1: there is no second copy.
    secondary_partition_size: int | None = None
    partitioned_parameters: int | None = None  # number of parameters that are really sharded; None: not stage 3
    # Every key that a DeepSpeed JSON file may hold -> the value in the engine. Empty: not DeepSpeed. Records from
    # before 2026-11-21 have neither this field nor the next one.
    settings: dict[str, bool | int | float | str | None] | None = None
    compiled_graphs: int | None = None  # number of graphs that TorchDynamo compiled on rank 0; 0: nothing was compiled
    num_gpus: int | None = None  # number of GPUs that the ranks use; None: a CPU, or an old record that does not say
    # Number of ranks on each machine, by machine rank; None: a record from before 2026-11-22.
    ranks_of_machines: list[int] | None = None
    swap_bytes_written: list[int] | None = None  # per rank, whole training
    swap_bytes_read: list[int] | None = None


class ModelStateBytes(Facts):
    """The bytes of one rank's model states and buffers. Shared storage counts once (arXiv:1910.02054, sec. 3.1)."""

    parameters: int
    gradients: int
    optimizer_states: int  # moments, step counts and fp32 masters
    # Buckets that hold no gradient, and storage that gradients keep alive beyond their own bytes; not in the paper.
    communication_buffers: int
    swapped: int | None = None  # bytes of this rank's files in the swap folder; None: nothing is offloaded to NVMe
    by_device: dict[str, int]  # the same bytes by device: cpu, cuda

    @property
    def model_states(self) -> int:
        """The bytes that the paper counts: parameters, gradients and optimizer states, without buffers."""
        return self.parameters + self.gradients + self.optimizer_states


class Collective(Facts):
    """The calls of one kind of collective by rank 0 in one optimizer step after the warm-up."""

    kind: str  # the prefix subgroup_ means a collective among some of the ranks
    count: int
    bytes: int  # of the whole tensor: the input of all-reduce and reduce-scatter, the output of all-gather

    @property
    def moved_bytes(self) -> int:
        """The bytes sent. An all-reduce, also that of NCCL, sends its bytes twice (arXiv:1910.02054, sec. 7.1)."""
        return self.bytes * (2 if self.kind.endswith("all_reduce") else 1)


class PeakMemory(Facts):
    """The peak memory of one rank in one phase of the run."""

    tensor_bytes: int | None = None  # CPU: peak of the live tensors that Python sees, in the probed step
    # CPU: the largest possible error of tensor_bytes, which may be too large; None: not measured then
    unreleased_bytes: int | None = None
    resident_bytes: int | None = None  # CPU: high-water mark of the process's resident set since the phase began
    allocated_bytes: int | None = None  # GPU: peak of PyTorch's allocator, reset at the phase's start
    reserved_bytes: int | None = None
    process_bytes: int | None = None  # GPU: memory of the process according to NVML, sampled
    process_average_bytes: int | None = None


class Timing(Facts):
    """Seconds per optimizer step. Each step has the time of its slowest rank. Warm-up and probed steps are left out."""

    num_steps: int
    num_warmup_steps: int
    probed_steps: list[int]
    median_seconds: Amount | None
    lower_quartile_seconds: Amount | None
    upper_quartile_seconds: Amount | None
    data_wait_median_seconds: float | None  # how long the host waits for the next batch; a GPU computes meanwhile
    samples_per_second: float | None  # world total, at the median
    tokens_per_second: float | None  # world total, padding not counted


class Load(Facts):
    """Processor time on rank 0's machine while the run trained, evaluated and saved.

    Only the processors that the run might use are counted.
    """

    seconds: float
    num_processors: int
    own_seconds: float  # used by the processes of this run on this machine
    other_seconds: float  # used by all other processes, including threads of the kernel
    stolen_seconds: float  # time that a hypervisor gave to other virtual machines


class Network(Facts):
    """The traffic of a machine's network interfaces, without the loopback, in and between steps after the warm-up.

    It includes headers, acknowledgements and the traffic of other programs.
    """

    interfaces: list[str]  # the interfaces that carried traffic
    rate_bits_per_second: int | None  # the lowest limit that `tc` sets for one of them; None: no limit, or unknown
    num_steps: int  # number of complete steps
    sent_bytes: int
    received_bytes: int


class Code(Facts):
    """The version of the study's code and the processor that one process of a run used."""

    commit: str | None  # None: the code is not in a clone
    is_dirty: bool | None  # whether the clone had changes
    sha256: str  # digest of all modules
    # Records from before 2026-11-26 lack the following fields.
    processor: str | None = None  # the model of the processor; None: unknown
    num_threads: int | None = None  # number of threads that PyTorch uses in the process


class Continued(Facts):
    """The checkpoint of another run from which this run started."""

    run_id: str
    strategy: str
    world_size: int
    step: int


class Checkpointing(Facts):
    """The number, size and duration of the checkpoints that the run's last process wrote."""

    count: int
    seconds: float  # how long training waited while they were written
    last_bytes: int | None  # bytes of the last checkpoint's files; None: there was no checkpoint
    # Time to load the checkpoint from which the process resumed; None: no resumption, or not recorded.
    load_seconds: float | None = None


class Checksum(Facts):
    """The checksum of all parameters of the unsharded model, in the order of their names and as fp32."""

    absolute_sum: float  # sum of absolute values, in double precision
    square_sum: float
    sha256: str


class StepDigest(Facts):
    """Digests of the weights and the optimizer's moments after a step, to compare two runs.

    They are computed from unsharded tensors in the order of the parameters' names. Each digest is the first 16
    hexadecimal digits of SHA-256.
    """

    step: int
    weights: str  # in 16-bit training those of the fp32 master weights, if the engine has them
    # Adam's first moments, which reflect the gradients; None: the engine does not expose them.
    first_moments: str | None
    second_moments: str | None


Memory = Literal["device", "host", "cap"]  # GPU memory, the machine's memory, or a limit on the memory of a process


class Failure(Facts):
    step: int | None  # the last step that began; None: no step began
    error: str
    memory: Memory | None = None  # which memory ran out; None: no memory did, or a record from before 2026-11-24


# The former names of statuses, from before 2026-11-24, and the present names.
RENAMED = {
    "build_failed": "crashed",
    "offload_failed": "crashed",
    "crashed_after_result": "crashed",
    "output_failed": "killed",
    "node_failed": "killed",
    "preempted": "killed",
}
_Renamed = BeforeValidator(lambda status: RENAMED.get(status, status) if isinstance(status, str) else status)

# Statuses of runs that were ended from outside. They are no results: the same command resumes the run from its last
# checkpoint.
CUT_OFF = frozenset({"interrupted", "killed", "timed_out", "stalled"})
RecordStatus = Literal["ok", "out_of_memory", "failed", "interrupted", "killed", "timed_out", "stalled"]


# Text on hardware and versions that is shown at the top of pages. It has no line breaks, no HTML, no table separators
# and no control characters.
_Shown = Annotated[str, Field(pattern=r"^[^<>|\p{C}\p{Zl}\p{Zp}]*$")]


class _Gpu(BaseModel):
    name: _Shown
    memory_bytes: int = Field(ge=1)


class _Library(BaseModel):
    sha256: str
    changed: list[str]


class _Imports(BaseModel):
    libraries: dict[str, _Library] = Field(default_factory=dict)


class _Machine(BaseModel):
    """The facts about a machine that tables read. Other facts are not checked."""

    cpu: _Shown | None = None
    num_cores: Count | None = None
    usable_cores: Amount | None = None
    num_threads_per_process: Count | None = None
    host_memory_bytes: Count | None = None
    gpus: list[_Gpu] = Field(default_factory=list)
    libraries: dict[str, _Shown | None] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    imports: _Imports = Field(default_factory=_Imports)
    tf32: bool | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None


class _Data(BaseModel):
    """The facts about the data that tables read. Other facts are not checked."""

    digest: str | None = None
    num_train_examples: Count = 0
    num_eval_examples: Count = 0


def _holds(kind: type[BaseModel]) -> AfterValidator:
    """Return a validator that checks a dictionary against `kind` when a record is read. Other keys are allowed."""

    def check(facts: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if info.context == READ:
            with refusing(info.field_name or ""):
                kind.model_validate(facts, strict=True)
        return facts

    return AfterValidator(check)


Machine = Annotated[dict[str, Any], _holds(_Machine)]

# Knobs that the config of every record has, even of the oldest.
_NEVER_NEW = ("workload", "size", "seed", "global_batch_size", "sequence_length")


def _whole_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a run's configuration, completed with the defaults of knobs that did not exist when it was written.

    Raises ValueError if the configuration is not valid.
    """
    if lacking := next((name for name in _NEVER_NEW if name not in config), None):
        raise ValueError(f"config.{lacking} is missing")
    with refusing("config"):
        complete = RunConfig.model_validate_json(json.dumps(config), strict=True)
    return complete.model_dump(mode="json") | config


_PER_RANK = ("model_state_bytes", "resting_state_bytes", "peak_memory", "energy_joules")
_OF_RESULTS = ("proof", "final_loss", "steps_sha256", "initial_parameters", "final_parameters")


class Record(Facts):
    """The raw facts of one run: the content of record.json."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: Name
    status: Annotated[RecordStatus, _Renamed]
    failure: Failure | None = None
    started_at: Timestamp
    wall_seconds: Amount
    command: list[str]
    workload: str
    size: str
    strategy: Name
    world_size: int = Field(ge=1)
    seed: int
    init: Literal["pretrained", "scratch", "weights"]
    weights_sha256: str | None = None  # digest of the file that a run with --weights starts from
    config: Annotated[dict[str, Any], AfterValidator(_whole_config)]
    num_params: Count | None = None  # of the whole model, with the frozen ones and the adapter's
    num_trainable_params: Count | None = None  # None: a record from before 2026-11-28, in which all are trained
    # Forward and backward pass, counted by torch.utils.flop_counter (training/optimizer_steps.py).
    model_flops_per_sequence: int | None = None
    data: Annotated[dict[str, Any], _holds(_Data)] | None = None
    proof: Proof | None = None
    model_state_bytes: list[ModelStateBytes] | None = None  # one per rank, just before the optimizer steps
    resting_state_bytes: list[ModelStateBytes] | None = None  # one per rank, between two steps
    peak_memory: list[dict[str, PeakMemory]] | None = None  # per rank: phase -> peaks
    collectives_per_step: list[Collective] | None = None
    initial_parameters: Checksum | None = None
    final_parameters: Checksum | None = None
    digests: list[StepDigest] | None = None  # None: no digests were requested
    steps_done: Count = 0
    final_loss: float | None = None
    energy_joules: list[float | None] | None = None  # per rank: energy of its whole GPU while all steps were trained
    tokens: Count | None = None  # number of tokens trained on, without padding
    samples: Count | None = None
    # A value is null if it exceeds the range of a float.
    evaluation: list[dict[str, float | None]] = Field(default_factory=list)
    timing: Timing | None = None
    machine: Machine
    steps_sha256: str | None = None
    resumed_at: list[int] = Field(default_factory=list)  # the steps after which another process resumed the run
    continues: Continued | None = None  # None: the run did not start from another run's checkpoint
    checkpointing: Checkpointing | None = None  # None: no checkpoints were requested
    # Records from before 2026-11-21 lack the following fields.
    config_sha256: str | None = None  # digest of config.json in the same run directory
    # The content of the strategy's YAML file, and the JSON file that belongs to it.
    strategy_file: dict[str, Any] | None = None
    launcher: list[str] | None = None  # the command of `accelerate launch` that was executed
    load: Load | None = None  # None: another process resumed the run, or the record is from before 2026-11-21
    # Records from before 2026-11-22 lack the following fields.
    # the other machines, by machine rank; None: there is one machine, or the run did not end
    other_machines: list[Machine] | None = None
    network: list[Network] | None = None  # of each machine; None: there is one machine, or too few steps
    # Records from before 2026-11-23 lack the following fields.
    # of each process that trained a part of the run, in order; `resumed_at` has the steps between the parts
    code: list[Code] | None = None

    @property
    def mixed_code(self) -> str | None:
        """A message if parts of the run were trained by different code.

        None if only one version of the code is known to have trained it.
        """
        parts = {part.sha256: part for part in self.code or ()}
        if len(parts) < 2:
            return None
        names = [f"{(part.commit or 'no commit')[:7]}{'-dirty' * bool(part.is_dirty)}" for part in parts.values()]
        return f"parts of it were trained by different code ({', then '.join(names)})"

    @property
    def mixed_processors(self) -> str | None:
        """A message if parts of the run used different processors or numbers of threads. None if they did not."""
        parts = [(part.processor, part.num_threads) for part in self.code or () if part.num_threads is not None]
        if len(set(parts)) < 2:
            return None
        names = [f"{threads} threads on {processor or 'an unknown processor'}" for processor, threads in parts]
        return f"parts of it were trained on different processors or threads ({', then '.join(names)})"

    @property
    def commits(self) -> set[str]:
        """The commits of all code that trained a part of the run. The suffix -dirty means uncommitted changes."""
        commits_of_parts = {part.commit + "-dirty" * bool(part.is_dirty) for part in self.code or () if part.commit}
        of_machine = self.machine.get("git_commit")
        return commits_of_parts | (
            {of_machine + "-dirty" * bool(self.machine.get("git_dirty"))} if of_machine else set()
        )

    @property
    def device(self) -> str:
        """The device that the run trained on, or would have trained on: "cuda" or "cpu"."""
        return self.proof.device if self.proof else "cuda" if self.machine.get("gpus") else "cpu"

    @property
    def usable_cores(self) -> float | None:
        """The number of cores of the first machine that the run was allowed to use.

        Older records do not hold it. For them it is the number of all cores.
        """
        usable: float | None = self.machine.get("usable_cores")
        return self.machine.get("num_cores") if usable is None else usable

    @property
    def boxes(self) -> list[str]:
        """The GPUs of each machine by name, or the first machine's CPU if the run trained without a GPU.

        A run that did not end records only how many other machines it had. They are assumed to equal the first machine,
        because a run trains only if all machines have the same model of GPU. The name of a simulated GPU says so.
        """
        if self.device == "cpu":
            cores, usable = self.machine.get("num_cores"), self.usable_cores
            limit = "" if usable == cores else f"{usable:g} of "
            num_cores = "unknown" if cores is None else cores
            return [f"{self.machine.get('cpu') or 'unknown CPU'}, {limit}{num_cores} cores"]
        num_machines = len(self.proof.ranks_of_machines or [1]) if self.proof else 1
        machines = [self.machine, *(self.other_machines or [self.machine] * (num_machines - 1))]
        gpus = [Counter(gpu["name"] for gpu in machine.get("gpus", [])) for machine in machines]
        kind = SIMULATED if self.is_simulated else ""
        return [
            " + ".join(f"{n} x {kind}{name}" for name, n in sorted(counts.items())) or UNKNOWN_BOX for counts in gpus
        ]

    @property
    def is_simulated(self) -> bool:
        """Whether the GPUs of a machine of the run were simulated. Such a record is no measurement."""
        return any(map(is_simulated, [self.machine, *(self.other_machines or [])]))

    @property
    def box(self) -> str:
        """The hardware of the run: "8 x NVIDIA H200", "2 x 8 x NVIDIA H200" for two machines, or a CPU and its cores.

        Without a GPU it is the hardware of the first machine, because the machines of a laboratory are one computer. A
        run that was not allowed to use all cores counts as a run on other hardware: "1 of 8 cores".
        """
        counts = Counter(self.boxes)
        return " + ".join(name if count == 1 else f"{count} x {name}" for name, count in sorted(counts.items()))

    @property
    def network_rate(self) -> float | None:
        """The rate of the run's slowest machine in bits per second in each direction. None if a rate is unknown.

        Infinity means that a laboratory did not limit the network. If `tc` shows no limit for a machine, its rate is
        unknown unless a laboratory set it.
        """
        laboratory = bits_per_second(str(self.machine.get("environment", {}).get(LABORATORY)))
        limits = [each.rate_bits_per_second for each in self.network or []] or [None]
        rates = [laboratory if limit is None else float(limit) for limit in limits]
        known_rates = [rate for rate in rates if rate is not None]
        return min(known_rates) if len(known_rates) == len(rates) else None

    @model_validator(mode="after")
    def _is_one_run(self, info: ValidationInfo) -> Record:
        """Raise ValueError if parts of a record that is read from a file contradict each other.

        Tables combine these parts without further checks.
        """
        if info.context == READ:
            self._check_ranks()
            self._check_config()
            self._check_measurements()
            self._check_status()
        return self

    def _check_ranks(self) -> None:
        for name in _PER_RANK:
            ranks = getattr(self, name)
            if ranks is not None and len(ranks) != self.world_size:
                raise ValueError(f"{name} has values of {len(ranks)} ranks, but world_size is {self.world_size}")

    def _check_config(self) -> None:
        """Raise ValueError if the record or its proof contradicts the run's configuration."""
        config = RunConfig.model_validate(self.config)
        pairs = {name: (getattr(self, name), getattr(config, name)) for name in ("workload", "size", "seed")}
        batches = config.batches(self.world_size)
        if self.proof:
            proven = (self.proof.micro_batch_size, self.proof.gradient_accumulation_steps)
            pairs["proof's batches"] = proven, batches
            pairs["proof.precision"] = self.proof.precision, config.precision
            pairs["proof.world_size"] = self.proof.world_size, self.world_size
        for name, (recorded, configured) in pairs.items():
            if recorded != configured:
                raise ValueError(f"{name} is {recorded!r}, but the config has {configured!r}")

    def _check_measurements(self) -> None:
        if any(not {"step", "loss"} <= entry.keys() for entry in self.evaluation):
            raise ValueError("evaluation: an entry has no step or no loss")
        if self.timing and self.timing.median_seconds is not None:
            for name in ("samples_per_second", "tokens_per_second", "data_wait_median_seconds"):
                if getattr(self.timing, name) is None:
                    raise ValueError(f"timing.{name} is missing, although timing.median_seconds is there")

    def _check_status(self) -> None:
        """Raise ValueError if a failed run has no reason, or if a run with status ok lacks a result."""
        if self.status != "ok":
            if self.failure is None:
                raise ValueError(f"the status is {self.status}, but failure is missing")
            return
        missing = [name for name in _OF_RESULTS if getattr(self, name) is None]
        missing += [name for name in ("steps_done", "evaluation") if not getattr(self, name)]
        if missing:
            raise ValueError(f"{missing[0]} is missing, although every run with status ok has it")


OutcomeStatus = Literal[
    "ok",
    "out_of_memory",  # Outcome.memory tells which memory
    # Ended from outside: a signal ended a rank or the launcher, or the run's folder, disk or machine was lost.
    "killed",
    "stalled",  # a rank did not join a collective within collective_timeout
    "timed_out",
    "misconfigured",  # refused by the program or the engine before the first step
    "failed",  # it ran, but did not train: a loss is NaN or infinite
    "crashed",  # any other error, also of an extension or of offload; a record with status ok is complete nevertheless
    "skipped",  # not started; the message has the reason
]


class Outcome(Facts):
    """The outcome of one planned run as the runner saw it: outcome.json in the run directory.

    A run has an outcome even if it left no record.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    study: Name
    # Digest of the study's file at that time; None: an outcome from before this field existed.
    study_sha256: str | None = None
    run_id: Name
    status: Annotated[OutcomeStatus, _Renamed]
    message: str  # one line
    memory: Memory | None = None  # the memory that ran out; None: no memory did, or an outcome from before 2026-11-24
    workload: str
    size: str
    strategy: Name
    world_size: int
    seed: int
    global_batch_size: int
    # The run's whole configuration; None: an outcome from before this field existed.
    config: dict[str, Any] | None = None
    round: int  # the round of the study, counted from 0
    position: int  # position among all runs that this study folder ever started, from 1; skipped runs count too
    started_at: Timestamp
    wall_seconds: float | None  # from launch to end; None: not started
    returncode: int | None
    command: list[str]  # the command that was started, or that would have been started
    stderr_tail: list[str]  # the last lines, oldest first
    # Whether the GPUs were simulated on a CPU (tests/simulated_gpu). Outcomes from before this field have False.
    simulated_gpus: bool = False


def write(run_dir: Path, record: Record) -> Path:
    """Write record.json to a run directory, and return its path. It is the last file that a run writes."""
    path = run_dir / "record.json"
    content = record.model_dump(mode="json")
    files.write_json(path, {**content, DIGEST: _digest(content)})
    return path


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> Record:
    """Read a record.json, given its path or its run directory.

    Raises Refusal, which names the file and the key, if the content is not valid.
    """
    path = path / "record.json" if path.is_dir() else path
    return parse(path, files.load(path, "a record"), Record)


def read_outcome(path: Path) -> Outcome:
    """Read an outcome.json.

    Raises Refusal, which names the file and the key, if the content is not valid.
    """
    return parse(path, files.load(path, "an outcome"), Outcome)


def parse(place: Path | str, content: Any, schema: type[Kind]) -> Kind:
    """Return the content of a file or a line as an object of a schema.

    `place` names the source in messages. Raises Refusal, which names the place and the key, if the content is not
    valid.
    """
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):  # True equals 1
        raise Refusal(
            f"{place}: the record has schema_version {version!r}, but this version of zero-study reads "
            f"{SCHEMA_VERSION}. Run it again."
        )
    facts = {key: value for key, value in content.items() if key != DIGEST or schema is not Record}
    with refusing(str(place)):
        parsed = schema.model_validate(facts, strict=True, context=READ)
        if len(facts) < len(content) and content[DIGEST] != _digest(facts):
            raise ValueError(
                f"the content has a different {DIGEST}, so it was changed after it was written. Restore "
                "the file, or delete it"
            )
        return parsed
