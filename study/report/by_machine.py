"""Make tables of models on machines with GPUs: predictions, published measurements, and measurements by this project.

The functions return tables with one row per model, machine and strategy. Each row has the memory of a GPU, the tokens
per second of the whole machine and the price of a billion tokens, each with the ends of its interval. A value that a
row does not have is NaN. An interval without an end on one side has NaN there. The column `source` says which kind of
figure a row has: `PREDICTED`, `PUBLISHED` or `MEASURED`. `shown` replaces predictions by measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from study.accuracy import published_rows
from study.compare.predicted import shape_of
from study.report import tables
from study.report.captions import Head, joined
from zero_study import planner
from zero_study.engines.strategy_names import StrategyName, in_order
from zero_study.files import ROOT
from zero_study.planner.choose import Advice, StrategyPrediction
from zero_study.terminal import GIB
from zero_study.theory import hardware, measured_by_others
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.measured_by_others import MeasuredCase
from zero_study.theory.shapes import ModelShape

# What README's picture and the notebook show. The models have their usual numbers of tokens per sequence.
MODELS = {"bert-large": 512, "gpt2-xl": 1024, "llama-3.1-8b": 4096, "qwen2.5-32b": 4096}
MACHINES = (("a100-80gb", 1), ("a100-80gb", 8), ("h100-sxm", 8), ("h100-sxm", 16))
STRATEGIES = ("single", "ddp", "zero2", "zero3", "fsdp2", "zero3_cpu_offload")
TOKENS_PER_STEP = 2**19

PREDICTED, PUBLISHED, MEASURED = "predicted", "published", "measured"
KEY = ["model", "machine", "strategy"]
QUANTITIES = ("memory", "speed", "cost")  # GiB per GPU, tokens per second, US dollars per billion tokens
ENDS = {name: [name, f"{name}_low", f"{name}_high"] for name in QUANTITIES}
# `lacks`: the memory that a strategy lacks if it does not fit, such as "host memory".
COLUMNS = [
    *KEY,
    "source",
    "fits",
    "lacks",
    "capacity",
    *(column for ends in ENDS.values() for column in ends),
    "setting",
]
BILLION = 1e9

IN_16_BITS = ("bf16", "bf16-autocast", "pure-bf16", "fp16", "fp16-autocast")
GRADES = ("A", "B")  # a row of grade C gives only a rough idea
CHECKPOINTED = {False: "", True: "activation checkpointing", "selective": "selective checkpointing",
                "selective-op": "selective checkpointing"}  # fmt: skip
SAME_SIZE = 0.01  # models whose numbers of parameters differ by less have only other heads

Advices = Mapping[tuple[str, str], Advice]  # by model and machine


# ---------------------------------------------------------------- what the planner predicts


def ask(
    models: Mapping[str, int] = MODELS,
    machines: Iterable[Sequence[Any]] = MACHINES,
    tokens_per_step: int = TOKENS_PER_STEP,
    **settings: Any,
) -> dict[tuple[str, str], Advice]:
    """Return the planner's answers for every model on every machine, by model and machine.

    `models` has the tokens per sequence of each model. A machine is the name of a GPU and the number of GPUs. All
    strategies have the same number of tokens per optimizer step. `settings` are further fields of the planner's
    request, such as `stack`. Raises Refusal if the planner cannot answer.
    """
    machines = [(str(gpu), int(count)) for gpu, count in machines]
    return {
        (model, f"{count} x {gpu}"): planner.advise(
            model,
            planner.Request(
                gpu=gpu,
                num_gpus=count,
                sequence_length=length,
                global_batch_size=max(1, tokens_per_step // length),
                **(_rented_host(gpu, count) | settings),
            ),
        )
        for model, length in models.items()
        for gpu, count in machines
    }


def _rented_host(gpu: str, count: int) -> dict[str, Any]:
    """Return the part of a node's host that is rented with this many GPUs, as fields of the planner's request.

    A price per GPU buys only this part. The fields are missing if the node is not known, or if all of it is used.
    """
    box = hardware.rented_box(hardware.find_gpu(gpu), count)
    if not box.is_part_of_node or not box.host_memory_bytes:
        return {}
    assert box.host_memory_bandwidth is not None  # known with the node
    return {
        "host_memory": box.host_memory_bytes / GIB,
        "host_cores": box.host_cores,
        "host_bandwidth": box.host_memory_bandwidth / 1e9,
    }


def predicted(
    advices: Advices, strategies: Iterable[str] = STRATEGIES, prices: Mapping[str, float] = {}
) -> pd.DataFrame:
    """Return a table of the planner's predictions, with a row per model, machine and strategy.

    The recommended strategy is always among them. A strategy that does not fit has its memory, but neither speed nor
    cost. `prices` has US dollars per GPU and hour for GPUs whose price is not to be that of the project's table.
    """
    rows = []
    for model, machine in advices:
        for option in _options(advices[model, machine], strategies):
            memory = float(option.needed_bytes) / GIB
            ends = memory * (1 - memory_error()), memory * (1 + memory_error())
            rows.append(
                {
                    "model": model,
                    "machine": machine,
                    "strategy": option.strategy.name,
                    "source": PREDICTED,
                    "fits": option.fits,
                    "lacks": "" if option.fits else option.lacking or "GPU memory",
                    "capacity": option.prediction.usable_bytes / GIB,
                    **dict(zip(ENDS["memory"], (memory, *ends), strict=True)),
                    **(_speed_and_cost(*_rates(option), _price(option, prices)) if option.fits else {}),
                    "setting": _setting(option.prediction.engine, option.prediction.job),
                }
            )
    return _table(rows)


def _options(advice: Advice, strategies: Iterable[str]) -> list[StrategyPrediction]:
    """Return the options of these strategies and the recommended one."""
    best = [] if advice.recommended is None else [advice.recommended.strategy.name]
    by_name = {option.strategy.name: option for option in advice.options}
    return [by_name[name] for name in in_order([*strategies, *best]) if name in by_name]


@cache
def memory_error() -> float:
    """Return the 90th percentile of the errors of predicted tensor peaks, compared with published peaks of grade A."""
    (entry,) = (
        row for row in published_rows.memory() if row["predictor"] == "planner" and row["group"] == _PEAKS_OF_GRADE_A
    )
    return float(entry["percentile_90"])


_PEAKS_OF_GRADE_A = f"{published_rows.METRICS['peak_allocated_bytes']}, grade A"


def _rates(option: StrategyPrediction) -> tuple[float, float, float]:
    """Return the tokens per second of the machine, and the ends of their interval. NaN if a step has no upper end."""
    step = option.prediction.step
    rate = float(option.prediction.tokens_per_second_per_gpu) * option.prediction.box.num_gpus
    low = float("nan") if option.is_rough else rate * float(step.total / step.high)
    return rate, low, rate * float(step.total / step.low)


def _price(option: StrategyPrediction, prices: Mapping[str, float]) -> float:
    """Return the US dollars per hour of the machine. NaN if the price of the GPU is not known."""
    box = option.prediction.box
    price = prices.get(box.gpu.name, box.gpu.price_per_hour)
    return float("nan") if price is None else price * box.num_gpus


def _speed_and_cost(rate: float, low: float, high: float, dollars_per_hour: float) -> dict[str, float]:
    """Return the columns of speed and cost. The fastest end of the speed is the cheapest end of the cost."""
    costs = [dollars_per_hour / 3600 / tokens * BILLION for tokens in (rate, high, low)]
    return dict(zip([*ENDS["speed"], *ENDS["cost"]], [rate, low, high, *costs], strict=True))


def _setting(engine: Engine, job: StepConfig) -> str:
    """Describe what a run computes: precision, tokens per sequence, batch and checkpointing."""
    parts = [engine.precision, f"{float(job.sequence_length):,.0f} tokens"]
    parts.append(f"batch {float(job.micro_batch_size):g} x {float(job.gradient_accumulation_steps):g}")
    parts += [CHECKPOINTED[job.activation_checkpointing]] if job.activation_checkpointing else []
    return ", ".join([*parts, "compiled"] if job.compiled else parts)


# ---------------------------------------------------------------- what others measured


def published(advices: Advices, prices: Mapping[str, float] = {}) -> pd.DataFrame:
    """Return a table of published measurements of these models on exactly these machines.

    Only measurements in 16 bits of the grades A and B are included. Their settings differ from those of the
    predictions, so the columns `setting` and `differences` say what was run. `what` names the quantity, because
    published amounts of memory are of several kinds, and `url` has the source.
    """
    rows = []
    for (model, machine), advice in advices.items():
        for case in _all_cases_of(advice):
            if case.engine.precision not in IN_16_BITS or case.grade not in GRADES:
                continue
            rows.append(
                {
                    "model": model,
                    "machine": machine,
                    "strategy": strategy_of(case.engine),
                    "source": PUBLISHED,
                    **_values(case, advice, prices),
                    "setting": f"{case.shape.name}: {_setting(case.engine, case.job)}",
                    "differences": differences(case, advice),
                    "grade": case.grade,
                    "measured_by": case.measured_by,
                    "url": case.url,
                }
            )
    return _table(rows, "what", "differences", "grade", "measured_by", "url")


def _all_cases_of(advice: Advice) -> list[MeasuredCase]:
    """Return the published times and peaks of a model on exactly this machine, with every precision and grade."""
    cases = (*measured_by_others.cases("times"), *measured_by_others.cases("memory"))
    return [
        case
        for case in cases
        if (case.quantity in (*measured_by_others.TIMES, *_PEAKS, "fits"))
        and (case.box.gpu.name, case.box.num_gpus) == (advice.box.gpu.name, advice.box.num_gpus)
        and is_same_model(case.shape, advice.shape)
    ]


# Memory that a run needed at its peak, by the name of the quantity.
_PEAKS = {name: text for name, text in published_rows.METRICS.items() if name != "allocated_bytes"}


def _values(case: MeasuredCase, advice: Advice, prices: Mapping[str, float]) -> dict[str, Any]:
    """Return the columns with the value of a published measurement."""
    if case.quantity == "fits":
        return {"fits": bool(case.published), "what": "trained" if case.published else "ran out of memory"}
    if case.quantity in _PEAKS:
        return {"fits": True, "memory": case.published / GIB, "what": _PEAKS[case.quantity]}
    tokens = case.sequences * case.engine.world_size * float(case.job.sequence_length)
    nan = float("nan")
    price = _price(advice.options[0], prices)
    return {"fits": True, **_speed_and_cost(tokens / case.seconds, nan, nan, price), "what": "tokens per second"}


def strategy_of(engine: Engine) -> str:
    """Return the name of the shipped strategy that has an engine's stage and offload. Buffer sizes may differ."""
    if engine.kind == "deepspeed":
        return str(StrategyName.of_zero(engine.zero_stage, engine.offload_optimizer))
    offload = "" if engine.offload_param == "none" else f"_{engine.offload_param}_offload"
    return {"torch": "single", "ddp": "ddp", "fsdp": "fsdp2"}[engine.kind] + offload


def is_same_model(shape: ModelShape, other: ModelShape) -> bool:
    """Return whether two shapes are the same model. Their output heads and vocabularies may differ."""
    sizes = [(each.layers, each.hidden, each.heads, each.kv_heads, each.head_size) for each in (shape, other)]
    return sizes[0] == sizes[1] and abs(shape.num_params / other.num_params - 1) < SAME_SIZE


def differences(case: MeasuredCase, advice: Advice) -> str:
    """Return the settings in which a published run differs from the prediction of its strategy, in words.

    If the strategy has no prediction, the first one is compared, because all have the same precision and length.
    """
    by_name = {option.strategy.name: option for option in advice.options}
    option = by_name.get(strategy_of(case.engine), advice.options[0])
    engine, job = option.prediction.engine, option.prediction.job
    pairs = {
        "model": (case.shape.name, advice.shape.name),
        "precision": (case.engine.precision, engine.precision),
        "tokens per sequence": (case.job.sequence_length, job.sequence_length),
        "batch": (_batch(case.job), _batch(job)),
        "activation checkpointing": (case.job.activation_checkpointing, job.activation_checkpointing),
        "torch.compile": (case.job.compiled, job.compiled),
        "attention": (case.job.attention, job.attention),
        "kernels": (case.job.kernels, job.kernels),
        "loss": (case.job.loss_kernel, job.loss_kernel),
        "optimizer": (
            (case.engine.optimizer, case.engine.optimizer_kernel),
            (engine.optimizer, engine.optimizer_kernel),
        ),
    }
    return ", ".join(name for name, (theirs, ours) in pairs.items() if theirs != ours)


def _batch(job: StepConfig) -> tuple[float, float]:
    return float(job.micro_batch_size), float(job.gradient_accumulation_steps)


# ---------------------------------------------------------------- what this project measured


def committed_on_gpus() -> list[Path]:
    """Return the folders of committed records from machines with GPUs: reports/NAME/records without those of CPUs."""
    return [path for path in sorted((ROOT / "reports").glob("*/records")) if path.parent.name != "cpu"]


def measured(
    advices: Advices, records: str | Path | Sequence[str | Path] = (), prices: Mapping[str, float] = {}
) -> pd.DataFrame:
    """Return a table of this project's measured runs, with a row per model, machine and strategy.

    `records` are folders of runs or of collected records. Without any, they are those of `committed_on_gpus`. A run
    counts if it finished, if its model, adapter, GPU, number of GPUs, precision, tokens per sequence and compiling are
    those of the prediction, and if each of its processes had a GPU of its own. If several batches were run, the fastest
    one is taken, as the planner does. The speed is the median of its runs, from the slowest to the fastest, and counts
    padding, as the predictions do. The memory is the largest peak of tensors.
    """
    folders = tables.folders(records) if isinstance(records, (str, Path)) or records else committed_on_gpus()
    if not folders:
        return _table([])
    runs = tables.runs(folders)
    runs = runs[(runs["status"] == "ok") & (runs["device"] == "cuda")]
    rows = []
    for (model, machine), advice in advices.items():
        for option in advice.options:
            matching = runs[[_is_of(run, advice, option) for run in runs.to_dict("records")]]
            if len(matching):
                key = {"model": model, "machine": machine, "strategy": option.strategy.name}
                rows.append({**key, **_measured_row(matching, option, prices)})
    return _table(rows)


def _is_of(run: Mapping[str, Any], advice: Advice, option: StrategyPrediction) -> bool:
    """Return whether a finished run on GPUs is one of an option of the planner."""
    record, prediction = run["record"], option.prediction
    if record.proof is None or record.config["share_device"] or record.is_simulated:
        return False
    names = {gpu["name"] for gpu in record.machine.get("gpus", [])}
    gpu = hardware.find(names.pop()) if len(names) == 1 else None
    recorded = (run["strategy"], run["processes"], record.proof.precision, run["sequence_tokens"], gpu and gpu.name)
    wanted = (
        option.strategy.name,
        prediction.box.num_gpus,
        prediction.engine.precision,
        prediction.job.sequence_length,
        prediction.box.gpu.name,
    )
    if recorded != wanted or bool(record.config.get("compile")) != prediction.job.compiled:
        return False
    shape = shape_of(record)
    return shape is not None and is_same_model(shape, advice.shape) and shape.adapter == advice.shape.adapter


def _measured_row(runs: pd.DataFrame, option: StrategyPrediction, prices: Mapping[str, float]) -> dict[str, Any]:
    proofs = [record.proof for record in runs["record"]]
    batches = [(proof.micro_batch_size, proof.gradient_accumulation_steps) for proof in proofs]
    checkpointed = [bool(record.config["activation_checkpointing"]) for record in runs["record"]]
    runs = runs.assign(
        batch=batches, checkpointed=checkpointed, rate=runs["sequences_per_second"] * runs["sequence_tokens"]
    )
    medians = runs.groupby(["batch", "checkpointed"])["rate"].median().sort_values(na_position="first")
    (micro, steps), is_checkpointed = medians.index[-1]
    runs = runs[(runs["batch"] == (micro, steps)) & (runs["checkpointed"] == is_checkpointed)]
    peaks, rates = runs["peak_gib"], runs["rate"]
    job = StepConfig(micro, int(runs["sequence_tokens"].iloc[0]), steps, bool(is_checkpointed))
    return {
        "source": MEASURED,
        "fits": True,
        "lacks": "",
        "capacity": option.prediction.usable_bytes / GIB,
        **dict(zip(ENDS["memory"], (peaks.max(), peaks.min(), peaks.max()), strict=True)),
        **_speed_and_cost(rates.median(), rates.min(), rates.max(), _price(option, prices)),
        "setting": f"{_setting(option.prediction.engine, job)}, {len(runs)} {'run' if len(runs) == 1 else 'runs'}",
    }


# ---------------------------------------------------------------- together


class Comparison(NamedTuple):
    """The answers of the planner for models on machines, and the tables that are made of them."""

    advices: Advices
    rows: pd.DataFrame  # predictions, or measurements where there are any
    others: pd.DataFrame  # what others published
    best: pd.DataFrame  # the recommended strategy on each machine

    def of_model(self, model: str) -> Comparison:
        """Return the part of the comparison that concerns one model."""
        advices = {key: advice for key, advice in self.advices.items() if key[0] == model}
        return Comparison(advices, *(table[table["model"] == model] for table in self[1:]))


def compare(
    models: Mapping[str, int] = MODELS,
    machines: Iterable[Sequence[Any]] = MACHINES,
    strategies: Iterable[str] = STRATEGIES,
    tokens_per_step: int = TOKENS_PER_STEP,
    prices: Mapping[str, float] = {},
    records: str | Path | Sequence[str | Path] = (),
    **settings: Any,
) -> Comparison:
    """Return the comparison of models on machines. For the parameters, see `ask`, `predicted` and `measured`."""
    advices = ask(models, machines, tokens_per_step, **settings)
    rows = shown(predicted(advices, strategies, prices), measured(advices, records, prices))
    return Comparison(advices, rows, published(advices, prices), best(rows, advices))


def shown(predictions: pd.DataFrame, measurements: pd.DataFrame) -> pd.DataFrame:
    """Return one table of predictions and measurements, in which a measurement replaces its prediction.

    The order is that of the predictions. A measurement replaces only what it has: a run without step times leaves the
    predicted speed and cost.
    """
    measurements = measurements.merge(predictions[KEY], on=KEY)  # of the strategies that are shown
    kept = predictions.set_index(KEY)
    for _, row in measurements.iterrows():
        for columns in ENDS.values():
            if pd.notna(row[columns[0]]):
                kept.loc[tuple(row[KEY]), columns] = float("nan")
    has_values = kept[list(QUANTITIES)].notna().any(axis=1)
    parts = [part for part in (kept[has_values].reset_index(), measurements) if len(part)]
    places = {key: place for place, key in enumerate(kept.index)}
    rows = pd.concat(parts, ignore_index=True)[COLUMNS]
    return rows.iloc[sorted(rows.index, key=lambda at: places[tuple(rows.loc[at, KEY])])].reset_index(drop=True)


def best(rows: pd.DataFrame, advices: Advices) -> pd.DataFrame:
    """Return a table of the recommended strategy per model and machine, with measured values if there are any.

    The columns `memory_source` and `speed_source` name the sources. `change` has the options with which `advise`
    recommends another training, and its strategy. A machine on which no strategy fits has no row.
    """
    found = []
    for (model, machine), advice in advices.items():
        strategy = None if advice.recommended is None else advice.recommended.strategy.name
        values = rows[(rows["model"] == model) & (rows["machine"] == machine) & (rows["strategy"] == strategy)]
        if not len(values):
            continue
        row: dict[str, Any] = {"model": model, "machine": machine, "strategy": strategy}
        change = advice.change
        row["change"] = "" if change is None else f"{change.flags}: {change.option.strategy.name}"
        for name in ("capacity", "setting", *(column for ends in ENDS.values() for column in ends)):
            known = values[name].dropna()
            row[name] = known.iloc[-1] if len(known) else float("nan")
        for name in ("memory", "speed"):
            row[f"{name}_source"] = values.loc[values[name].last_valid_index(), "source"]
        found.append(row)
    return pd.DataFrame(found)


def kinds(rows: pd.DataFrame, others: pd.DataFrame) -> str:
    """Return which kinds of numbers a plot shows: "predicted", "measured by others" and so on."""
    names = {PREDICTED: "predicted", MEASURED: "measured by this project"}
    ours = joined(name for source, name in names.items() if (rows["source"] == source).any())
    has_points = others[list(QUANTITIES)].notna().any(axis=None)
    return f"{ours}, with points that others measured" if has_points else ours


def head(part: Comparison) -> Head:
    """Return the title and subtitle of the figure of a comparison: its settings, and where its numbers come from."""
    advice = next(iter(part.advices.values()))
    request, shape = advice.request, advice.shape
    length = request.sequence_length or 0
    is_one = part.rows["model"].nunique() == 1
    model = f"{shape.name} with {shape.num_params / 1e6:,.0f} million parameters, {length:,} tokens per sequence, "
    setting = (
        f"{model if is_one else ''}{request.chosen_precision}, "
        f"{(request.global_batch_size or 0) * length:,} tokens per optimizer step, with the defaults of {request.stack}"
    )
    sources = ["Dots with lines: predicted, not measured."]
    if (part.rows["source"] == MEASURED).any():
        sources.append("Squares: measured by this project, with different batches.")
    if part.others[list(QUANTITIES)].notna().any(axis=None):
        sources.append("Diamonds: measured by others, with different settings.")
    title = f"Memory, speed and cost: {shape.name}" if is_one else "Memory, speed and cost of every model"
    return Head(title, " ".join(sources), setting)


def heading(advice: Advice) -> str:
    """Return the model of an answer with its size and the length of its sequences."""
    count, length = advice.shape.num_params, advice.request.sequence_length or 0
    size = f"{count / 1e6:.0f} million" if count < 1e9 else f"{count / 1e9:.2g} billion"
    return f"{advice.shape.name}: {size} parameters, {length:,} tokens"


def left_out(advices: Advices) -> dict[str, int]:
    """Return how many published times and amounts of memory are not shown for these models, by reason."""
    reasons: Counter[str] = Counter()
    for advice in advices.values():
        for case in _all_cases_of(advice):
            if case.engine.precision not in IN_16_BITS:
                reasons[f"in {case.engine.precision}"] += 1
            elif case.grade not in GRADES:
                reasons[f"of grade {case.grade}"] += 1
    return dict(sorted(reasons.items()))


def prices_text(machines: Iterable[Sequence[Any]] = MACHINES, prices: Mapping[str, float] = {}) -> str:
    """Return a sentence with the price of each GPU, its date and its source."""
    parts = []
    for name in dict.fromkeys(str(gpu) for gpu, _ in machines):
        gpu = hardware.find_gpu(name)
        if name in prices:
            parts.append(f"{name}: {prices[name]:.2f} (given)")
        elif gpu.price_per_hour is not None:
            parts.append(f"{name}: {gpu.price_per_hour:.2f} ({gpu.price_source}, {gpu.price_date})")
        else:
            parts.append(f"{name}: not known")
    return f"Prices in US dollars per GPU and hour: {'; '.join(parts)}."


def _table(rows: list[dict[str, Any]], *others: str) -> pd.DataFrame:
    numbers = ["capacity", *(column for ends in ENDS.values() for column in ends)]
    return pd.DataFrame(rows, columns=[*COLUMNS, *others]).astype(dict.fromkeys(numbers, float))
