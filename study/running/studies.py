"""Read a study from its YAML file, and list its runs in the order in which they are run."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator

from study.config import LARGEST_SEED, RunConfig, build_config
from study.records.laboratory import bits_per_second
from study.run import Run
from zero_study import files
from zero_study.errors import Refusal, describe, unknown_name_message
from zero_study.strategy import file
from zero_study.strategy.file import Strategy, read_by_name

STUDIES = Path(__file__).resolve().parents[1] / "studies"

# Options that are not flags of a part, and where to set them instead.
_NOT_FLAGS = {
    "seed": "list it under seeds",
    "data": "write text: real, or text: bundled, at the level of parts",
    "data_dir": "pass --data-dir to zero-study run",
    "output_dir": "`zero-study run` sets it",
    "resume": "a study resumes by itself. Delete its folder to start again",
    "swap_dir": "a run swaps to its own folder. To measure a disk, pass a folder on it as --runs-dir",
}
_SWITCHES = {name for name, knob in RunConfig.model_fields.items() if knob.annotation is bool}

# A launch takes about 7 s, so this many runs need most of a day for launches alone. The longest study that the project
# ships has 270 runs.
MOST_RUNS = 10_000
MOST_PROCESSES = 1_000_000
MOST_MACHINES = 64

Rung = TypeVar("Rung")
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, le=LARGEST_SEED)], ...], Field(min_length=1), files.FROM_LIST]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1, le=MOST_PROCESSES)], ...], Field(min_length=1), files.FROM_LIST]


class Part(files.StrictModel):
    """A part of a study: every combination of its lists of options, all with the same flags."""

    flags: dict[str, Any] = Field(default_factory=dict)  # options of train.py, by the names of the fields of RunConfig
    # Names of strategies, or paths of accelerate files.
    strategies: Annotated[tuple[str, ...], files.FROM_LIST] = tuple(file.names())
    world_sizes: Sizes = (2,)
    global_batch_sizes: Sizes | None = None  # sequences per optimizer step; None: all runs have that of the flags
    # Model sizes, smallest first. None: that of the flags.
    sizes: Annotated[tuple[str, ...], Field(min_length=1), files.FROM_LIST] | None = None
    # The list whose largest value that trains is searched by bisection. A run is skipped if another run of the part
    # already decides it.
    largest: Literal["sizes", "global_batch_sizes"] | None = None
    seeds: Seeds = (0,)
    machines: int = Field(1, ge=1, le=MOST_MACHINES)
    # Rate of a laboratory's network ("200mbit", "unlimited"); None: one machine, or real machines.
    rate: str | None = None
    repeats: int = Field(1, ge=1)  # how often every combination is repeated, with equal flags
    label: str = Field("", pattern=r"^[a-z0-9_]*$")  # distinguishes parts that differ only in flags

    @model_validator(mode="after")
    def _check(self) -> Part:
        """Raise ValueError (Refusal is a subclass) if the part cannot be turned into runs."""
        self._check_keys_have_one_place()
        self._check_lists()
        self._check_flags()
        for name in self.strategies:
            file.find_strategy(name)
        return self

    def _check_keys_have_one_place(self) -> None:
        misplaced = _NOT_FLAGS.keys() & self.flags.keys()
        if misplaced:
            name = min(misplaced)
            raise ValueError(f"flags.{name} is not an option of a part: {_NOT_FLAGS[name]}")
        for flag, values in (("global_batch_size", self.global_batch_sizes), ("size", self.sizes)):
            if values and flag in self.flags:
                raise ValueError(f"flags.{flag} and {flag}s cannot both be given. Remove one of them.")
        if self.largest and not getattr(self, self.largest):
            raise ValueError(
                f"largest: {self.largest}: this part has no list {self.largest}. Add this "
                "list, with the smallest value first."
            )
        if self.rate is not None and (self.machines == 1 or bits_per_second(self.rate) is None):
            raise ValueError(
                f"rate: {self.rate}: a rate needs `machines: 2` or more, and has the form 200mbit or unlimited."
            )

    def _check_lists(self) -> None:
        uneven = next((size for size in self.world_sizes if size % self.machines), None)
        if uneven:
            raise ValueError(
                f"world_sizes: {uneven} processes cannot be divided equally among {self.machines} machines."
            )
        if not self.strategies:
            raise ValueError("strategies is empty. Remove this key to use every strategy.")
        for key in ("strategies", "world_sizes", "global_batch_sizes", "sizes", "seeds"):
            value, count = Counter(getattr(self, key) or (None,)).most_common(1)[0]
            if count > 1:
                raise ValueError(f"{key}: {value} is listed twice. To repeat runs, write repeats: 2.")

    def _check_flags(self) -> None:
        unknown_flags = set(self.flags) - {"preset", *RunConfig.model_fields}
        if unknown_flags:
            name = min(unknown_flags)
            raise ValueError(f"flags.{name} is not an option of training. `zero-study train --help-all` lists them.")
        for name, value in self.flags.items():
            is_switch = name in _SWITCHES
            if value is not None and isinstance(value, bool) != is_switch:
                remedy = "true or false, without quotes" if is_switch else "a value"
                raise ValueError(f"flags.{name}={value!r}: write {remedy}")

    def _cells(self) -> list[dict[str, Any]]:
        sizes = [{"size": size} for size in self.sizes or ()] or [{}]
        batches = [{"global_batch_size": batch} for batch in sorted(self.global_batch_sizes or ())] or [{}]
        if self.largest == "sizes":
            sizes = bisecting(sizes)
        elif self.largest:
            batches = bisecting(batches)
        return [{**size, **batch} for size in sizes for batch in batches]

    def round(self, index: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield the strategy, processes and sizes of each run of one round, in blocks of equal work.

        The yielded tuples are (strategy, processes, cell). A cell has the model size and the global batch size if the
        part lists them. The first strategy changes from block to block and from round to round, and every other round
        goes through the strategies backwards. So no strategy always runs first, when a machine is cold, or always after
        the same other strategy.
        """
        step = max(1, len(self.strategies) // self.num_rounds)
        blocks = [(world_size, cell) for world_size in self.world_sizes for cell in self._cells()]
        for number, (world_size, cell) in enumerate(blocks):
            first, direction = index * step + number, -1 if index % 2 else 1
            for place in range(len(self.strategies)):
                name = self.strategies[(first + direction * place) % len(self.strategies)]
                fixed = read_by_name(name).fixed_processes
                # Such a strategy has one run, whatever the world sizes are.
                if fixed is None or world_size == self.world_sizes[0]:
                    yield name, fixed or world_size, cell

    def rung(self, config: RunConfig) -> tuple[str, int] | None:
        """Return the option whose largest value is searched, and the position of a run's value among the tried ones.

        None if the part searches no largest value.
        """
        if self.largest == "sizes":
            return "size", (self.sizes or ()).index(config.size)
        return ("global_batch_size", config.global_batch_size) if self.largest else None

    @property
    def num_rounds(self) -> int:
        return self.repeats * len(self.seeds)

    @property
    def most_runs(self) -> int:
        """The number of runs if every strategy ran on every number of processes."""
        num_cells = len(self.global_batch_sizes or (None,)) * len(self.sizes or (None,))
        return self.num_rounds * len(self.strategies) * len(self.world_sizes) * num_cells


def bisecting(rungs: list[Rung]) -> list[Rung]:
    """Sort values in the order of bisection: the middle first, then the middles of both halves, and so on."""
    order: list[Rung] = []
    segments = [rungs]
    while segments:
        segment = segments.pop(0)
        middle = len(segment) // 2
        order += segment[middle : middle + 1]
        segments += [half for half in (segment[:middle], segment[middle + 1 :]) if half]
    return order


# ---------------------------------------------------------------- what was fixed before the first run
#
# Each outcome holds the digest of the study's file, so a protocol that was changed after a run is seen.


def _day(text: str) -> str:
    """Return a date in ISO 8601 format. Raises ValueError if the text is not such a date."""
    return datetime.date.fromisoformat(text).isoformat()


Names = Annotated[tuple[str, ...], files.FROM_LIST]
Share = Annotated[float, Field(gt=0, lt=1)]


class Protocol(files.StrictModel):
    """The protocol of a study, which is fixed before its first run.

    It has the endpoint, the margin, the null variants, the positive controls and the gates.
    """

    fixed_on: Annotated[str, AfterValidator(_day)]  # the day on which the protocol was committed
    pilot: str = Field(min_length=1)  # the runs that were made before, which are not part of the result
    step: int = Field(ge=1)  # the endpoint is the held-out loss at this step
    margin: float = Field(gt=0)  # a mean relative difference within this margin counts as no difference
    # The null: labels of parts or strategies whose training differs from the control's only in rounding.
    variants: Names
    # Labels of parts whose training is wrong on purpose; if one of them is not detected, there is no verdict.
    broken: Names
    broken_study: str | None = None  # another study with one more such arm, with other releases of the engines
    # A relative difference from the control's loss, far above rounding, from which a run counts as different.
    noticed: float = Field(gt=0)
    # The gate: for every seed, the control's held-out loss at `step` is at most this share of the loss before step 1.
    falls_to: float = Field(gt=0, lt=1)
    # The level of each test. p-values of tests against the null are corrected by Holm's method over the arms.
    significance: Share = 0.05
    exclusions: Names  # a description of the runs that are left out


# ---------------------------------------------------------------- a study


class Study(files.StrictModel):
    """A question, and the runs that answer it."""

    name: str  # the name of the study's file
    question: str = Field(min_length=1)
    control: str = "ddp"  # the strategy that the others are compared with
    # Real text comes from --data-dir, or by default from the Hugging Face Hub.
    text: Literal["bundled", "real"] = "bundled"
    device: Literal["any", "gpu"] = "any"
    parts: Annotated[tuple[Part, ...], Field(min_length=1), files.FROM_LIST]
    protocol: Protocol | None = None  # None: nothing was fixed beforehand
    sha256: str  # digest of the study's file

    @model_validator(mode="after")
    def _check(self) -> Study:
        files.check_name(self.name, "the study's name")
        num_runs = sum(part.most_runs for part in self.parts)
        if num_runs > MOST_RUNS:
            raise ValueError(
                f"{num_runs:,} runs are planned, but a study has at most {MOST_RUNS:,}. Divide it into several studies."
            )
        shipped_or_planned = {*file.names(), *(read_by_name(name).name for name in self._strategies)}
        if self.control not in shipped_or_planned:
            raise ValueError(
                f"control {self.control!r} is not a strategy. Name a strategy, or remove this key to use 'ddp'."
            )
        self._check_configurations()
        self._check_protocol()
        return self

    @property
    def _strategies(self) -> set[str]:
        return {name for part in self.parts for name in part.strategies}

    def _check_configurations(self) -> None:
        data = "hub" if self.text == "real" else "bundled"
        for number, part in enumerate(self.parts):
            for _, _, cell in part.round(0):
                try:
                    build_config(**part.flags, **cell, data=data)
                except Refusal as refusal:
                    raise ValueError(f"parts.{number}: {refusal}") from None

    def _check_protocol(self) -> None:
        if self.protocol is None:
            return
        arms = {part.label for part in self.parts} | self._strategies
        missing_arms = {*self.protocol.variants, *self.protocol.broken} - arms
        if missing_arms:
            raise ValueError(
                f"protocol: no part has the label or the strategy {min(missing_arms)!r}. Add it to a "
                "part, or correct its name."
            )


def names() -> list[str]:
    """List the names of the studies that the project ships."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def require_name(output: Path | None) -> None:
    """Raise Refusal for a command without a study, unless it is given in the clone, or names a folder to write to."""
    if output is None and Path.cwd() != files.ROOT:
        raise Refusal(
            f"No study is named. Name a YAML file or one of {', '.join(names())}. Without a study, the command makes "
            "all files of the project's own reports. For this, change to the clone's folder, or add --output FOLDER."
        )


def find(name: str) -> Study:
    """Read a shipped study by its name, or a user's own study by the path of its YAML file.

    Raises Refusal, which names the file and the key, if the study does not exist or is not valid.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else STUDIES / f"{name}.yaml"
    if not path.is_file():
        raise Refusal(unknown_name_message("study", name, names(), "name a YAML file or one of"))
    content = files.read_yaml(path, STUDIES)
    own = {"name": path.stem, "sha256": files.sha256(path)}
    reserved = min(own.keys() & content.keys(), default=None)
    if reserved:
        raise Refusal(
            f"{path}: {reserved} is not a key of a study, because the study takes its {reserved} from the file. "
            "Remove it."
        )
    try:
        return Study.model_validate({**own, **content})
    except ValidationError as error:
        first = error.errors()[0]
        # The project's own errors describe the problem, but not the part of the study.
        place = ".".join(map(str, first["loc"])) if first["type"] == "value_error" else ""
        raise Refusal(describe(error, f"{path}: {place}" if place else str(path))) from None


def runs(
    study: Study, data_dir: Path | None = None, folder: Path | None = None, checkpoint_every: int | None = None
) -> list[Run]:
    """List a study's runs in the order in which they are run: round by round, so that repeats are interleaved.

    Each run has its own run directory in the study's folder, which is runs/NAME by default. Raises Refusal if the file
    of a strategy cannot be read, or if two runs have the same id.
    """
    folder = folder or Path("runs") / study.name
    common: dict[str, Any] = {"data": "bundled"}  # this overrides a preset
    if study.text == "real":
        common = {"data": "files", "data_dir": data_dir} if data_dir else {"data": "hub"}
    elif data_dir:
        raise Refusal(
            f"--data-dir {data_dir}: study {study.name!r} trains on the bundled sample. Leave --data-dir out."
        )
    if checkpoint_every:
        common["checkpoint_every"] = checkpoint_every
    planned: dict[str, Run] = {}
    for index in range(max(part.num_rounds for part in study.parts)):
        for part in study.parts:
            if index >= part.num_rounds:
                continue
            repeat, nth_seed = divmod(index, len(part.seeds))
            for name, world_size, cell in part.round(index):
                config = build_config(**part.flags, **cell, **common, seed=part.seeds[nth_seed])
                chosen = read_by_name(name)
                run_id = _run_id(part, config, chosen, world_size, cell, repeat)
                if run_id in planned:
                    raise Refusal(
                        f"study {study.name!r}: two runs have the id {run_id}. Give one of the parts another label."
                    )
                planned[run_id] = Run(
                    config,
                    chosen,
                    world_size,
                    folder / run_id,
                    part.machines,
                    index,
                    laboratory=part.rate,
                    rung=part.rung(config),
                )
    return list(planned.values())


def _run_id(part: Part, config: RunConfig, chosen: Strategy, world_size: int, cell: dict[str, int], repeat: int) -> str:
    words = [config.workload, config.size, chosen.name, f"{world_size}x", f"seed{config.seed}"]
    words += [f"batch{cell['global_batch_size']}"] if "global_batch_size" in cell else []
    words += [part.label] if part.label else []
    words += [f"repeat{repeat}"] if repeat else []
    return "-".join(words)
