"""Predict the runs of a study on GPUs that are not available here, and write the predictions to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from study import run_in_theory
from study.config import RunConfig, build_config
from study.records.schema import SCHEMA_VERSION, Facts
from study.running import studies
from zero_study import files
from zero_study.errors import Refusal, refusing
from zero_study.strategy import file, theory_engine
from zero_study.strategy.file import Strategy
from zero_study.theory import adapters, hardware, peaks, prediction
from zero_study.theory.hardware import Gpu
from zero_study.version import __version__

# What the project ships: kinds and numbers of GPUs, and the studies that need GPUs.
BOXES = (("a100-40gb", 1), ("a100-80gb", 1), ("a100-80gb", 8), ("h100-sxm", 8), ("h200", 1))
STUDIES = ("single-gpu", "multi-gpu", "offload", "buckets", "batch-size", "model-size")

# The libraries whose buffers and collectives the theory models. The modules of theory/ name the files that were read.
ENGINES = {"deepspeed": "0.19.8", "accelerate": "1.15.0", "transformers": "5.23.0"}

# The knobs that decide the memory and the time of a run, besides the strategy and the number of ranks.
KNOBS = (
    "workload", "size", "precision", "accumulation_dtype", "global_batch_size", "sequence_length", "dropout",
    "attention", "activation_checkpointing", "lora_rank", "lora_target", "lora_dropout", "load_in_4bit",
)  # fmt: skip

DIGITS = 4  # significant digits: more than a prediction is accurate to, and enough to see that it changed


class _Asked(Facts):
    """The options of a run that its memory and its time per step depend on.

    The seed and the number of steps are not among them.
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
    lora_rank: int | None = None
    lora_target: str | None = None
    lora_dropout: float = 0.0
    load_in_4bit: bool = False


class PredictedRun(_Asked):
    """The prediction of the theory for one configuration, without a measured run."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    num_params: int
    fits: bool
    # The host or disk space that a node lacks for offload, even if its GPUs have enough memory.
    lacking: str | None = None
    peak_bytes_per_gpu: int  # only tensors, without the allocator's reserve
    parts: dict[str, int]  # the parts of the peak; a part that is missing is 0
    moment: str  # the moment of the step at which the peak occurs
    usable_bytes: int  # memory of a GPU that PyTorch's allocator can use
    # The usable bytes minus the peak and what the allocator reserves beyond it. Negative: the bytes that are missing.
    free_bytes: int
    host_bytes: int = 0  # of a rank, offloaded
    disk_bytes: int = 0  # of a rank, offloaded
    seconds_per_step: float  # if the run does not fit, as if it did
    seconds_low: float  # the real time is between seconds_low and seconds_high in 90 % of cases
    seconds_high: float
    tokens_per_second_per_gpu: float
    mfu: float
    collective_bytes: int  # sent by rank 0 in a step, counted as Collective.moved_bytes does


class UnpredictedRun(_Asked):
    """A configuration that the theory cannot predict, with the reason."""

    why: str


class PredictedBox(Facts):
    gpu: str  # its name in theory/hardware.py
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

    Runs that differ only in options outside `KNOBS`, such as the seed, count as one configuration. A run with fewer
    GPUs gets a proportional share of a node's host memory and disks. Configurations that the study would refuse, or
    that the theory cannot predict, are listed with the reason.

    Raises Refusal if the GPU is unknown, or if every run needs more GPUs.
    """
    with refusing():
        card = hardware.find_gpu(gpu)
        hardware.typical_box(card, num_gpus)
    data = "hub" if study.text == "real" else "bundled"  # decides the size of the vocabulary, and so of the embedding
    predicted: dict[tuple[Any, ...], PredictedRun | UnpredictedRun] = {}
    for part in study.parts:
        # A round has every combination once. The other rounds repeat it with another seed.
        planned = sorted(part.round(0), key=lambda run: (run[1], *run[2].values(), part.strategies.index(run[0])))
        for name, world_size, cell in planned:
            if world_size > num_gpus:
                continue
            config = build_config(**{**part.flags, **cell, "data": data})
            chosen = file.read_by_name(name)
            configuration = _asked(config, chosen, world_size)
            if (key := tuple(configuration.values())) in predicted:  # parts may differ only in options outside KNOBS
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
    shape, engine = run_in_theory.of_run(config, chosen, world_size)
    job = run_in_theory.job_of(config, world_size, "gpu")
    predicted = prediction.predict(shape, engine, job, hardware.rented_box(gpu, world_size))
    return {
        "micro_batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "num_params": adapters.num_total(shape),
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
    if config.share_device:  # the theory assumes one GPU per rank
        raise Refusal("trainings whose ranks share a GPU cannot be predicted")
    if config.precision == "fp64":  # the theory has no fp64 rates of GPUs, and no formulas with 8 bytes per number
        raise Refusal("trainings in fp64 cannot be predicted")
    if chosen.distributed_type == "FSDP" and config.precision not in ("fp32", "bf16"):
        raise Refusal(
            f"{chosen.name} does not support {config.precision}. It computes in fp32, or in bf16 with fp32 shards"
        )
    if theory_engine.precision_class(chosen, config.precision) != config.precision:
        raise Refusal(
            f"{config.precision} under {chosen.name} is refused, because only ZeRO-1 to ZeRO-3 and FSDP2 keep fp32"
            " master weights"
        )


def _rounded(value: float) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def _whole(value: float) -> int:
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
