"""Define the types of what commands print with --json. The JSON Schemas in docs/schemas are made from them.

A program may read an answer with them: `DoctorAnswer.model_validate_json(text)`. If a command refuses a request, or
fails, it prints an `ErrorAnswer`, which has no keys of its own. Objects of a type `dict[str, Any]` are open: they may
have any keys.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .envelope import PREFIX, VERSIONS, ErrorKind, Severity

Word = Literal["sound", "found", "refused", "unknown"]


class Closed(BaseModel):
    """The base class of JSON objects that may have only the declared keys."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Place(Closed):
    """The location of a finding. A key that is unknown or does not apply is None."""

    file: str | None
    """The file or folder, as it was named or found."""
    line: int | None
    """The line of the file or of the log, counted from 1."""
    key: str | None
    """The key in the file, with dots between sections."""
    name: str | None
    """The tensor, package, cell, strategy, run, claim or check that the finding concerns."""
    step: int | None
    """The optimizer step, counted from 1."""
    rank: int | None


class Finding(Closed):
    """One problem or note that a command reports, with its location and its remedy."""

    id: str
    """A stable id, such as "doctor/ignored-key". docs/schemas/finding-ids.json lists all of them."""
    severity: Severity
    """error and warning make the verdict "found"; a note does not."""
    place: Place
    text: str
    """What was found, in sentences."""
    remedy: str
    """What to do. Empty if no remedy is known."""


class Checked(Closed):
    """The number of things of one kind that a command compared."""

    number: int
    what: str


class NotChecked(Closed):
    """A check that was not made, with the reason."""

    what: str
    why: str
    requested: bool
    """Whether the check was requested or is essential. The verdict is then "unknown" if nothing was found."""


class Error(Closed):
    """The reason why a command gave no answer."""

    kind: ErrorKind
    message: str
    """One line: what is wrong, and what to do."""


class Envelope(Closed):
    """The keys that the output of every command has."""

    schema_name: str = Field(alias="schema")
    """The name of the schema, such as "zero-study/doctor"."""
    version: int
    """The version of the schema."""
    verdict: Word | None
    """None if the command only reports, so that there is nothing to judge."""
    exit_status: int
    """The status with which the command ends: 0 sound, 1 something found, 2 refused, 3 could not be checked."""
    findings: list[Finding]
    checked: list[Checked]
    could_not_check: list[NotChecked]
    error: Error | None
    """None if the command gave an answer."""


class ErrorAnswer(Envelope):
    """What a command prints if it refuses a request, or if it fails."""

    findings: list[Finding] = Field(max_length=0)
    error: Error


class Answer(Envelope):
    """The output of a command that has an answer. Each command adds its own keys."""

    verdict: Literal["sound", "found", "unknown"] | None
    error: None


class OpenAnswer(Answer):
    """An answer whose keys depend on the request, so that its schema allows further keys."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


class WholeTraining(Closed):
    """The predicted time and price of a whole training, without setup, evaluation and checkpoints."""

    tokens: float
    """Also the number of images, for a model that reads images only."""
    images: float | None = None
    steps: int
    hours: float
    hours_low: float
    hours_high: float | None
    """None if the prediction has no upper end."""
    dollars: float | None
    """US dollars. None if the price of the GPU is not known."""


class Collective(Closed):
    """All collective operations of one kind in a training step: how many, and their bytes."""

    kind: str
    count: int
    bytes: int


class TracedMemory(Closed):
    """The peak memory of a GPU in bytes, which `--trace` takes from a simulated training step."""

    peak_bytes: float
    parts: dict[str, float]
    moment: str
    reserved_bytes: float | None
    collectives_per_step: Any
    seconds: float
    """The seconds that tracing took."""


class PlaceBytes(Closed):
    """The bytes of one GPU's share of the model states, by where they are stored: on the GPU, in RAM or on disk."""

    device: int
    host: int
    disk: int


class AdvisedStrategy(Closed):
    """The predictions for one strategy, with the batch size that is fastest among those that fit."""

    strategy: str
    fits: bool
    lacking: str | None
    """What the machine has too little of, other than memory of the GPU."""
    peak_bytes_per_gpu: int
    """The bytes of the tensors at the peak."""
    needed_bytes_per_gpu: int
    """The bytes of the tensors at the peak, and what the allocator reserves beyond them."""
    needed_bytes_rests_on: str | None
    free_bytes_per_gpu: int
    """Negative if the strategy does not fit."""
    free_share: float
    """The free share of the usable memory, at most 1."""
    shown_by_nvidia_smi_bytes_per_gpu: int
    memory: dict[str, int]
    """The bytes at the peak, by part of the memory."""
    highest_moment: str
    """The moment of a step at which the peak occurs."""
    paper_model_state_bytes: PlaceBytes | None
    """What the ZeRO papers' formulas give. None if only a part of the weights is trained."""
    precision: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    activation_checkpointing: str
    largest_micro_batch_size: int
    """0 if no micro batch fits."""
    seconds_per_step: float
    seconds_per_step_low: float
    seconds_per_step_high: float | None
    """None if the prediction has no upper end."""
    seconds_per_step_rests_on: str | None
    tokens_per_second_per_gpu: float
    mfu: float
    """The share of the GPU's dense peak rate that the model's arithmetic uses."""
    communicated_bytes_per_step: int
    """The bytes that one rank sends in a step."""
    collectives_per_step: list[Collective]
    dollars_per_billion_tokens: float | None
    images_per_second_per_gpu: float | None = None
    dollars_per_million_images: float | None = None
    host_bytes_per_node: int
    host_needed_bytes_per_node: int
    host_free_share: float | None
    disk_bytes_per_node: int
    whole_training: WholeTraining | None
    traced: TracedMemory | None = None
    """None without --trace."""


class Change(Closed):
    """A change of the requested training that makes a strategy fit or improves the answer."""

    kind: str
    options: str
    """The options to add to the command."""
    strategy: str
    needed_bytes_per_gpu: int
    free_share: float
    micro_batch_size: int
    gradient_accumulation_steps: int
    seconds_per_step: float
    tokens_per_second_per_gpu: float
    images_per_second_per_gpu: float | None = None
    dollars_per_million_images: float | None = None


class RecommendedChange(Change):
    """The recommended change of the requested training, with predictions for the changed training."""

    assumed: dict[str, str]
    strategies: list[AdvisedStrategy]


class Launch(Closed):
    """The command and the files that start the recommended training."""

    stack: str
    command: str
    files: dict[str, str]
    """The content of each file by its name."""
    settings: list[str]
    """Settings that the training program has to set itself."""
    pod_command: str
    """The command in each pod of a Kubernetes cluster. Empty if accelerate does not start the program."""


class Machine(Closed):
    """A number of GPUs of one kind, with the best strategy for them and its predictions."""

    gpu: str
    num_gpus: int
    strategy: str
    has_enough_free: bool
    offloads: bool
    needed_bytes_per_gpu: int
    free_share: float
    seconds_per_step: float
    tokens_per_second: float
    """The tokens per second of all GPUs together."""
    images_per_second: float | None = None
    images_per_second_per_gpu: float | None = None
    dollars_per_hour: float | None
    dollars_per_billion_tokens: float | None
    dollars_per_million_images: float | None = None
    price_source: str | None
    whole_training: WholeTraining | None


class AdviseAnswer(OpenAnswer):
    """The answer of `advise`. Its keys depend on the command's options. The key `units` has their units.

    For one model on one machine, the keys are `strategies`, `recommended`, `reason`, `why_not`, `remedies`, `launch`.
    For several machines, they are `cheapest`, `fastest` and `machines`. Without --gpus, the key is `fewest_gpus`;
    without --model, `largest_models`; with --gpu list, `gpus`; and with --model list, `models`.
    """

    model: str | None = None
    gpu: str | None = None
    num_gpus: int | None = None
    answer: str | None = None
    """The answer in sentences."""
    recommended: str | None = None
    """The recommended strategy. None if none fits."""
    strategies: list[AdvisedStrategy] | None = None
    """The predictions for the training as requested, without `recommended_change`."""
    why_not: dict[str, str] | None = None
    """The reason why a strategy is not recommended, by strategy."""
    remedies: list[Change] | None = None
    """Changes of the request that make a strategy fit, in the order of the printed answer."""
    recommended_change: RecommendedChange | None = None
    """The recommended change of the request. If there is one, `launch` and `why_not` describe the changed training."""
    launch: Launch | None = None
    launch_without_change: Launch | None = None
    assumed: dict[str, str] | None = None
    notes: list[str] | None = None
    cheapest: Machine | None = None
    fastest: Machine | None = None
    enough: Machine | None = None
    """The cheapest larger machine that keeps the user's limits, if none of `machines` keeps them."""
    machines: list[Machine] | None = None
    units: dict[str, str] | None = None


class CheckAnswer(Answer):
    """The output of `check --json`."""

    configuration_files: list[str]
    lock_files: list[str]
    checkpoints: list[str]
    lock_files_compared_with: str | None
    """The commit whose lock files were compared with those of the project."""
    deepspeed_release: str | None
    """The release whose known faults were looked up, such as deepspeed==0.19.8. None if there is none, or several."""
    releases: list[str]
    """The releases by which configuration files were judged."""
    unused_changes: int
    """The number of known changes of releases that no file of the project uses."""
    accepted_findings: list[dict[str, Any]]
    accepted_without_finding: list[dict[str, Any]]


class ClaimsAnswer(Answer):
    """The answer of `claims`. With --check or --write, it contains no sentences."""

    sentences: list[dict[str, Any]]


class Table(Closed):
    """A table as it is printed. All cells are texts."""

    heading: str
    columns: list[str]
    rows: list[list[str]]


class Spread(Closed):
    """The median and the range of a quantity over several runs."""

    median: float
    low: float
    high: float


class ComparedRow(Closed):
    """The measurements in one row of `compare`. A row summarizes runs that differ only in their seeds."""

    strategy: str
    name: str
    """The strategy, and what distinguishes the row from others of the same strategy."""
    num_ranks: int
    seeds: list[int]
    runs: list[str]
    final_loss: Spread | None
    peak_bytes: Spread | None
    """The largest number of bytes that the tensors of one rank occupied."""
    seconds_per_step: Spread | None
    are_times_comparable: bool
    loss_compared_with_control: str | None
    """"same", a relative difference, or a word that says why losses cannot be compared."""
    peak_ratio_to_control: float | None
    seconds_ratio_to_control: float | None


class ComparedGroup(Closed):
    """The results of the same training with different strategies. The first row is the baseline (the control)."""

    training: str
    rows: list[ComparedRow]


class CompareAnswer(Answer):
    """The output of `compare --json`. The view `short` has the key `groups`. All other output has `tables`."""

    view: str
    groups: list[ComparedGroup]
    not_ok: list[str]
    """Lines about runs that did not finish."""
    tables: list[Table]


class ConformanceAnswer(Answer):
    """The output of `conformance --json`."""

    versions: dict[str, str | None]
    cells: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    python: str | None = None
    num_cores: int | None = None
    examined_at: str | None = None


class ExactAnswer(Answer):
    """The output of `exact --json`."""

    versions: dict[str, str | None]
    problem: dict[str, Any]
    sha256: dict[str, str]
    cells: list[dict[str, Any]]
    faults: list[dict[str, Any]]


class Difference(Closed):
    """A tensor in which two trainings differ by more than rounding."""

    step: int
    kind: str
    name: str
    ranks: list[int]
    distance: float | None
    """The distance relative to the norm of A's tensor. None if it is not finite."""
    bound: float | None
    """The largest distance that rounding explains, relative to the norm of A's tensor."""
    factor: float | None
    missing: str | None
    broken: str


class DiffAnswer(Answer):
    """The output of `diff --json`."""

    same: bool
    steps_compared: int
    unfinished: list[str]
    bound: str
    a: dict[str, Any]
    b: dict[str, Any]
    notes: list[str]
    replicas: list[str]
    alike: int
    furthest_of_bound: float | None
    causes: list[str]
    differences: list[Difference]


class FileOfDoctor(Closed):
    """A configuration file that `doctor` checked, with the effect of each of its keys."""

    file: str
    kind: str | None
    findings: list[dict[str, Any]]
    """All keys with their effects, also those that work as written."""
    verdict: Word
    exit_status: int
    checked: list[Checked]
    could_not_check: list[NotChecked]
    error: str | None = None
    """Why the file cannot be read."""


class CheckOfMachine(Closed):
    """A check of this machine's installation, with its outcome."""

    name: str
    verdict: Literal["ok", "note", "bites", "unknown"]
    message: str
    remedy: str


class DoctorAnswer(Answer):
    """The answer of `doctor`. Without files, `checks` contains the checks of this machine."""

    files: list[FileOfDoctor]
    checks: list[CheckOfMachine]
    fixed: dict[str, Any] | None
    """The file that --fix wrote, and its changes."""


class DryRunAnswer(Answer):
    """The output of `dry-run --json`."""

    file: str
    world_size: int
    exchange: Literal["real", "pretended"]
    notes: list[str]
    ranks: dict[str, dict[str, Any]]
    """For each rank, its collectives in order. For a model, also the bytes and seconds of the third step."""


class ImportedRun(Closed):
    """A run that `import` read from a log."""

    name: str
    file: str
    is_new: bool
    log_format: str
    ending: str
    num_logged_steps: int
    num_evaluations: int
    setting: dict[str, Any]
    totals: dict[str, float]
    not_read: list[str]


class ImportAnswer(Answer):
    """The output of `import --json`."""

    folder: str
    runs: list[ImportedRun]


class PlannedRun(Closed):
    """A run that `plan` lists, with the action that is planned: run it, keep the earlier run, or skip it."""

    run: str
    strategy: str
    num_ranks: int
    action: Literal["run", "keep", "skip"]
    reason: str | None
    """The earlier status of a run that is kept, or why a run is skipped."""
    estimated_seconds: float | None
    num_earlier_runs: int | None
    """The number of runs on which the estimate is based. If it is 0, the estimate is a guess."""


class PlanAnswer(Answer):
    """The runs of a study in `plan --json`. With --slurm, the output has only the study's name and the script."""

    study: str
    slurm_script: str | None
    question: str | None = None
    folder: str | None = None
    machine: str | None = None
    timeout_seconds: float | None = None
    estimated_seconds: float | None = None
    num_to_run: int | None = None
    num_kept: int | None = None
    num_skipped: int | None = None
    is_completely_checked: bool | None = None
    runs: list[PlannedRun] = []


class PredictAnswer(Answer):
    """The output of `predict --json`."""

    written: list[str]
    studies: list[dict[str, Any]]
    """The content of each written file."""


class ProveAnswer(Answer):
    """The answer of `prove`. Without --strict, `exit_status` is the exit status of the script."""

    proofs: list[dict[str, Any]]
    """The content of each proof.json, one per model of the script."""
    why_not_made: str | None


class SavedModel(Closed):
    """A saved model or checkpoint that `saved` checked, with its size and the findings about it."""

    folder: str
    format: str
    step: int | None
    tensors: int
    elements: int
    optimizer_states: int
    findings: list[dict[str, Any]]
    not_checked: list[str]


class SavedAnswer(Answer):
    """The output of `saved --json`."""

    folder: str
    status: int
    saved: list[SavedModel]
    compared: list[dict[str, Any]]


class UpgradeAnswer(Answer):
    """The output of `upgrade --json`."""

    vulns: list[dict[str, Any]]
    """Each change that can concern the training, in the OSV format."""
    left_out: dict[str, list[str]]
    """The ids of changes that cannot concern the training, by reason."""
    packages: dict[str, dict[str, str | None]]


class WhyAnswer(Answer):
    """The output of `why --json`."""

    first_failure: dict[str, Any] | None
    cause: dict[str, Any] | None
    """The first fact that says why the run failed. None if the log does not show it."""
    other_causes: list[dict[str, Any]]
    """All other facts."""
    question: str
    record: list[str]
    """Lines to copy that record what the log lacks."""
    lines: list[dict[str, Any]]
    files: list[dict[str, Any]]
    num_lines: int
    num_rows: int
    ranks: list[int]
    num_steps: int
    setting: dict[str, Any]
    environment: dict[str, Any] | None
    remedies: list[dict[str, Any]]
    known_faults_of_the_releases: list[dict[str, Any]]


# The type of each command's answer.
ANSWERS: dict[str, type[Answer]] = {
    "advise": AdviseAnswer, "check": CheckAnswer, "claims": ClaimsAnswer, "compare": CompareAnswer,
    "conformance": ConformanceAnswer, "diff": DiffAnswer, "doctor": DoctorAnswer, "dry-run": DryRunAnswer,
    "exact": ExactAnswer, "import": ImportAnswer, "plan": PlanAnswer,
    "predict": PredictAnswer, "prove": ProveAnswer, "saved": SavedAnswer, "upgrade": UpgradeAnswer, "why": WhyAnswer,
}  # fmt: skip


def validated(content: dict[str, Any]) -> Answer | ErrorAnswer:
    """Return the parsed JSON of a command as an object of its type, such as DoctorAnswer.

    Raises pydantic's ValidationError if it does not follow its schema.
    """
    if content.get("error") is not None:
        return ErrorAnswer.model_validate(content)
    command = str(content.get("schema")).removeprefix(PREFIX)
    return ANSWERS[command].model_validate(content)


def validated_text(text: str) -> Answer | ErrorAnswer:
    """Return the text that a command printed with --json as an object of its type, such as DoctorAnswer.

    Raises ValueError if the text is something else.
    """
    return validated(json.loads(text))


def json_schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints with --json: its answer, or an error.

    It allows keys that it does not know, because later releases may add some.
    """
    answer, error = (kind.model_json_schema() for kind in (ANSWERS[command], ErrorAnswer))
    definitions = answer.pop("$defs", {}) | error.pop("$defs", {})
    for part in (answer, error):
        part["properties"]["schema"]["const"] = f"{PREFIX}{command}"
        part["properties"]["version"]["const"] = VERSIONS[command]
    schema: dict[str, Any] = _open({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{PREFIX}{command}",
        "description": f"What `zero-study {command} --json` prints.",
        "anyOf": [answer, error],
        "$defs": dict(sorted(definitions.items())),
    })  # fmt: skip
    return schema


def _open(schema: Any) -> Any:
    """Return a JSON Schema that allows further keys in all objects."""
    if isinstance(schema, dict):
        return {
            key: _open(value) for key, value in schema.items() if (key, value) != ("additionalProperties", False)
        }  # fmt: skip
    return [_open(value) for value in schema] if isinstance(schema, list) else schema
