"""Predict the runs of a study on GPUs that are not available here, and write predicted records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from study import __version__, files
from study.config import RunConfig, build_config
from study.errors import Refusal, refusing
from study.records.schema import SCHEMA_VERSION, Facts
from study.running import studies
from study.strategy import file, in_theory
from study.strategy.file import Strategy
from study.theory import hardware, peaks, prediction
from study.theory.engine import Numbers
from study.theory.hardware import Gpu

# What the project ships: GPU and how many, and the studies that ask for GPUs.
BOXES = (("a100-40gb", 1), ("a100-80gb", 1), ("a100-80gb", 8), ("h100-sxm", 8), ("h200", 1))
STUDIES = ("single-gpu", "multi-gpu", "offload", "buckets", "batch-size", "model-size")

# Whose buffers and collectives the models describe; theory/ names the files that were read.
ENGINES = {"deepspeed": "0.19.8", "accelerate": "1.15.0", "transformers": "5.23.0"}

# What of a run decides its memory and its time, beside strategy and ranks.
KNOBS = (
    "workload", "size", "precision", "accumulation_dtype", "global_batch_size", "sequence_length", "dropout",
    "attention", "activation_checkpointing",
)  # fmt: skip

DIGITS = 4  # significant: more than a prediction is worth, and enough to see it change


class _Asked(Facts):
    """The part of a study's configuration that memory and time per step depend on.

    It leaves out seed, repeat and number of steps.
    """

    workload: str
    size: str
    strategy: str
    world_size: int
    precision: str
    accumulation_dtype: str = "fp32"
    global_batch_size: int
    sequence_length: int
    dropout: float
    attention: str
    activation_checkpointing: bool = False


class PredictedRun(_Asked):
    """What the theory predicts for one configuration. No run was measured for it."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    num_params: int
    fits: bool
    lacking: str | None = None  # what a node lacks for offload, though its GPUs may have room
    peak_bytes_per_gpu: int  # of tensors
    parts: dict[str, int]  # of the peak; a part that is not there is 0
    moment: str  # of the step, at which the peak is
    usable_bytes: int  # of a GPU, for torch's allocator
    free_bytes: int  # of them, beside the peak and what the allocator reserves beyond it; negative: what is missing
    host_bytes: int = 0  # of a rank, offloaded
    disk_bytes: int = 0  # of a rank, offloaded
    seconds_per_step: float  # as if it fitted, where it does not
    seconds_low: float  # nine times of ten it is between these two
    seconds_high: float
    tokens_per_second_per_gpu: float
    mfu: float
    collective_bytes: int  # of rank 0 in a step, as Collective.moved_bytes


class UnpredictedRun(_Asked):
    """A configuration that the theory cannot predict, with the reason."""

    why: str


class PredictedBox(Facts):
    gpu: str  # as theory/hardware.py names it
    num_gpus: int


class PredictedStudy(Facts):
    """The predictions for a study on one kind of machine: the content of one file of predicted records."""

    schema_version: Literal[1] = SCHEMA_VERSION
    status: Literal["predicted"] = "predicted"
    study: str
    box: PredictedBox
    made_with: dict[str, str]  # this project's version, and those of the libraries that its models describe
    command: list[str]
    predictions: list[PredictedRun]
    left_out: list[UnpredictedRun]


def predict_study(study: studies.Study, gpu: str, num_gpus: int) -> PredictedStudy:
    """Predict every configuration of a study that needs at most `num_gpus` GPUs.

    Runs that differ only in seed, repeat or number of steps count as one configuration. A run with fewer GPUs gets a
    proportional share of a node's host memory and disks. Configurations that the study would refuse, or that the theory
    cannot predict, are listed with the reason.

    Raises Refusal if the GPU is unknown, or if every run needs more GPUs.
    """
    with refusing():
        card = hardware.find_gpu(gpu)
        hardware.typical_box(card, num_gpus)
    data = "hub" if study.text == "real" else "bundled"  # whose vocabulary the embedding has
    predicted: dict[tuple[Any, ...], PredictedRun | UnpredictedRun] = {}
    for part in study.parts:
        # A round has every combination once; the others repeat it with another seed.
        planned = sorted(part.round(0), key=lambda run: (run[1], *run[2].values(), part.strategies.index(run[0])))
        for name, world_size, cell in planned:
            if world_size > num_gpus:
                continue
            config = build_config(**{**part.flags, **cell, "data": data})
            chosen = file.read_by_name(name)
            configuration = _asked(config, chosen, world_size)
            if (
                key := tuple(configuration.values())
            ) in predicted:  # parts that differ in what is trained on, or for how long
                continue
            try:
                predicted[key] = PredictedRun(**configuration, **_expected(config, chosen, world_size, card))
            except ValueError as why:
                predicted[key] = UnpredictedRun(**configuration, why=str(why))
    if not predicted:
        raise Refusal(f"study {study.name!r}: every run needs more than {num_gpus} GPUs. Raise --gpus.")
    return PredictedStudy(
        study=study.name,
        box=PredictedBox(gpu=card.name, num_gpus=num_gpus),
        made_with={"zero-study": __version__, **ENGINES},
        command=["zero-study", "predict", study.name, "--gpu", card.name, "--gpus", str(num_gpus)],
        predictions=[run for run in predicted.values() if isinstance(run, PredictedRun)],
        left_out=[run for run in predicted.values() if isinstance(run, UnpredictedRun)],
    )


def _asked(config: RunConfig, chosen: Strategy, world_size: int) -> dict[str, Any]:
    return {name: getattr(config, name) for name in KNOBS} | {"strategy": chosen.name, "world_size": world_size}


def _expected(config: RunConfig, chosen: Strategy, world_size: int, gpu: Gpu) -> dict[str, Any]:
    """Return the predicted fields of a `PredictedRun`, without those of the configuration.

    Raises ValueError (Refusal is a subclass) if there is no prediction.
    """
    _check(config, chosen)
    shape, engine = in_theory.of_run(config, chosen, world_size)
    job = in_theory.job_of(config, world_size, "gpu")
    predicted = prediction.predict(shape, engine, job, hardware.typical_box(gpu, world_size))
    return {
        "micro_batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "num_params": shape.num_params,
        "fits": bool(predicted.fits),
        "lacking": predicted.lacking,
        "peak_bytes_per_gpu": _whole(predicted.peak.total),
        "parts": {part: _whole(size) for part, size in predicted.peak.parts.items() if size},
        "moment": peaks.PEAK_MOMENTS[int(predicted.peak.moment)],
        "usable_bytes": _whole(predicted.usable_bytes),
        "free_bytes": _whole(predicted.free_bytes),
        "host_bytes": _whole(predicted.peak.host_bytes),
        "disk_bytes": _whole(predicted.peak.disk_bytes),
        "seconds_per_step": _rounded(predicted.step.total),
        "seconds_low": _rounded(predicted.step.low),
        "seconds_high": _rounded(predicted.step.high),
        "tokens_per_second_per_gpu": _rounded(predicted.tokens_per_second_per_gpu),
        "mfu": _rounded(predicted.mfu),
        "collective_bytes": _whole(predicted.communicated_bytes),
    }


def _check(config: RunConfig, chosen: Strategy) -> None:
    """Raise Refusal for what a run's checks refuse on every machine, and for ranks that share a GPU.

    This repeats some rules of study/running/checks.py, which needs torch.
    """
    if config.share_device:  # the models have a GPU for each rank
        raise Refusal("runs whose ranks share a GPU are not predicted")
    if config.precision == "fp64":  # no GPU is asked for its rate, and no formula has eight bytes a number
        raise Refusal("fp64 is not predicted")
    if chosen.distributed_type == "FSDP" and config.precision not in ("fp32", "bf16"):
        raise Refusal(
            f"{config.precision} under {chosen.name} is refused, because it computes in fp32, or in bf16 with fp32"
            " shards"
        )
    if in_theory.precision_class(chosen, config.precision) != config.precision:
        raise Refusal(
            f"{config.precision} under {chosen.name} is refused, because only ZeRO-1 to ZeRO-3 and FSDP2 keep fp32"
            " master weights"
        )


def _rounded(value: Numbers) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def _whole(value: Numbers) -> int:
    return int(_rounded(value))


# ---------------------------------------------------------------- files


def write(folder: Path, predictions: PredictedStudy) -> Path:
    """Write predictions to FOLDER/<gpu>-<n>x/<study>.json, one line per prediction, and return the path.

    Fields with their default values are left out. Raises Refusal if the folder cannot be written.
    """
    box = predictions.box
    path = folder / f"{box.gpu}-{box.num_gpus}x" / f"{predictions.study}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, _text(predictions).encode())
    except OSError as error:
        raise Refusal(
            f"--output {folder}: the folder cannot be written ({error.strerror}). Use another folder."
        ) from None
    return path


def write_all(folder: Path) -> list[Path]:
    """Write the predicted records that the project ships, and return their paths."""
    return [
        write(folder, predict_study(studies.find(name), gpu, num_gpus)) for gpu, num_gpus in BOXES for name in STUDIES
    ]


def _text(predictions: PredictedStudy) -> str:
    head = predictions.model_dump(mode="json", exclude={"predictions", "left_out"})
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key in ("predictions", "left_out"):
        entries = [entry.model_dump(mode="json", exclude_defaults=True) for entry in getattr(predictions, key)]
        lines = ",\n".join(f"  {json.dumps(entry, separators=(',', ':'), allow_nan=False)}" for entry in entries)
        parts.append(f" {json.dumps(key)}: [{f'{chr(10)}{lines}{chr(10)} ' if lines else ''}]")
    return "{\n" + ",\n".join(parts) + "\n}\n"
