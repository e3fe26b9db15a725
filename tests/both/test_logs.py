"""Import logs of all formats: what is read of each, and what happens to damaged, foreign and odd logs."""

from __future__ import annotations

import csv
import io
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusing import refusal

from study.public_runs import archive
from zero_study import cli
from zero_study.errors import Refusal, describe_missing
from zero_study.logs import draft, formats, imported, json_parts, reading
from zero_study.public_runs import folder
from zero_study.public_runs.schema import COLUMNS, PublicRun

JUNIPER = Path(__file__).parents[1] / "fixtures" / "logs" / "juniper_h100_n1_result_0.txt"
GIB = 1 << 30


def mllog(key: str, value: object, time_ms: int, **metadata: object) -> str:
    event = {"namespace": "", "time_ms": time_ms, "event_type": "POINT_IN_TIME", "key": key, "value": value}
    return f":::MLLOG {json.dumps({**event, 'metadata': {'file': 'train.py', 'lineno': 7, **metadata}})}\n"


def mlperf(benchmark: str = "llama2_70b_lora", status: str | None = "success") -> str:
    """The log of a benchmark with two losses and two evaluations. Without a status, the run does not stop."""
    position = "epoch_num" if benchmark == "bert" else "samples_count"
    return "".join(
        [
            mllog("submission_benchmark", benchmark, 1_000),
            mllog("submission_division", "closed", 1_000),
            mllog("submission_org", "A <b>company</b>", 1_000),
            mllog("submission_platform", "8 x H100", 1_000),
            mllog("global_batch_size", 400, 1_000),
            mllog("seed", 11, 1_000),
            mllog("opt_base_learning_rate", 3e-4, 1_000),
            mllog("weights_initialization", None, 1_000, tensor="embedding"),
            mllog("init_start", None, 1_000),
            mllog("init_start", None, 1_001),
            mllog("run_start", None, 10_000),
            "a line of another program\n",
            mllog("train_loss", 3.5, 12_000, **{position: 4_000}),
            mllog("eval_accuracy", 0.9, 13_000, **{position: 4_000}),
            mllog("tracked_stats", {"throughput": 2_000.0}, 14_000, **{position: 8_000}),
            mllog("train_loss", 2.5, 14_000, **{position: 8_000}),
            mllog("eval_accuracy", 0.8, 15_500, **{position: 8_000}),
            mllog("run_stop", None, 16_000, status=status, **{position: 8_000}) if status else "",
        ]
    )


def modded(last: int = 4, total: int = 4) -> str:
    """The log of modded-nanogpt: its program, the machine, and the steps."""
    lines = [
        "import torch",
        'print0(f"step:{step}/{train_steps} val_loss:{val_loss:.4f} train_time:{time:.0f}ms")',
        "=" * 100,
        "Running Python 3.12.3 (main, Jun 19 2026) [GCC 13.3.0]",
        "Running PyTorch 2.11.0+cu130 compiled for CUDA 13.0",
        "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:05:00.0 Off |                    0 |",
        "|   1  NVIDIA H100 80GB HBM3          On  |   00000000:06:00.0 Off |                    0 |",
        "|    0   N/A  N/A            6425      C   /usr/bin/python3                       1176MiB |",
        "=" * 100,
        f"step:0/{total} val_loss:10.8311 train_time:0ms step_avg:0.04ms",
        *(f"step:{n}/{total} train_time:{n * 226}ms step_avg:226.00ms" for n in range(1, last + 1)),
    ]
    if last == total:
        lines += [f"step:{total}/{total} val_loss:3.2784 train_time:{total * 226 + 5}ms step_avg:227.25ms"]
        lines += ["peak memory allocated: 36347 MiB reserved: 52032 MiB"]
    return "\n".join(lines) + "\n"


NANOGPT = """\
tokens per iteration will be: 491,520
step 0: train loss 10.9886, val loss 10.9898
iter 0: loss 10.9886, time 31410.41ms, mfu -100.00%
iter 10: loss 9.6211, time 44.10ms, mfu 3.01%
step 20: train loss 9.1000, val loss 9.1200
iter 20: loss 9.0100, time 44.30ms, mfu 3.00%
"""

LLM_C = "s:0 tel:10.968871\ns:0 trl:10.965596\ns:1 trl:10.814037 lr:0.0001 norm:2.5\ns:2 tel:10.7\n"

TORCHTITAN = """\
[titan] 2026-05-30 12:00:00,000 - root - INFO - CUDA capacity: NVIDIA H100 with 95.04GiB memory
[titan] 2026-05-30 12:00:01,000 - root - INFO - Model llama3 debugmodel size: 6,139,136 total parameters
[titan] 2026-05-30 12:00:01,000 - root - INFO - Applied selective activation checkpointing to the model
[titan] 2026-05-30 12:00:01,000 - root - INFO - Applied FSDP to the model
[titan] 2026-05-30 12:00:01,500 - root - INFO - Trainer is initialized with local batch size 8, global batch size 64, \
gradient accumulation steps 1, sequence length 2048, total steps 3 (warmup 2)
[titan] 2026-05-30 12:00:02,000 - root - INFO - Training starts at step 1
[titan] 2026-05-30 12:00:03,000 - root - INFO - step:  1  loss:  8.04910  grad_norm:  1.4200  memory:  0.50GiB(0.54%)  \
tps: 8,213  tflops: 0.59  mfu: 0.06%
[titan] 2026-05-30 12:00:04,250 - root - INFO - step:  2  loss:  7.75184  grad_norm:  1.5200  memory:  0.50GiB(0.54%)  \
tps: 18,213  tflops: 1,000.59  mfu: N/A
[titan] 2026-05-30 12:00:05,000 - root - INFO - validate step:  2  loss:  7.7000  memory:  0.25GiB(0.27%)  tps: 9,000
[titan] 2026-05-30 12:00:06,000 - root - INFO - step:  3  loss:  7.10000  grad_norm:  1.1200  memory:  0.50GiB(0.54%)  \
tps: 18,213  tflops: 1.59  mfu: 0.06%
[titan] 2026-05-30 12:00:07,000 - root - INFO - Training completed
"""

DEEPSPEED = """\
[2026-01-02 15:45:26,832] [INFO] [launch.py:164:main] dist_world_size=8
[2026-01-02 15:46:44,637] [INFO] [logging.py:128:log_dist] [Rank 0] DeepSpeed info: version=0.16.2, git-hash=unknown
[2026-01-02 15:46:44,700] [INFO] [utils.py:781:see_memory_usage] Before creating fp16 partitions
[2026-01-02 15:46:44,700] [INFO] [utils.py:782:see_memory_usage] MA 3.96 GB         Max_MA 4.0 GB         CA 5.1 GB    \
     Max_CA 6 GB
[2026-01-02 15:46:44,700] [INFO] [utils.py:789:see_memory_usage] CPU Virtual Memory:  used = 31.5 GB, percent = 6.3%
[2026-01-02 15:46:55,967] [INFO] [logging.py:128:log_dist] [Rank 0] step=0, skipped=0, lr=[5e-05], mom=[(0.9, 0.95)]
[2026-01-02 15:46:55,970] [INFO] [config.py:1003:print]   bfloat16_enabled ............. True
[2026-01-02 15:46:55,970] [INFO] [config.py:1003:print]   train_batch_size ............. 32
[2026-01-02 15:46:55,971] [INFO] [config.py:1003:print]   train_micro_batch_size_per_gpu  2
[2026-01-02 15:46:55,971] [INFO] [config.py:1003:print]   world_size ................... 8
[2026-01-02 15:46:55,971] [INFO] [config.py:1003:print]   zero_config .................. stage=2 offload_param=None \
offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(device='cpu', nvme_path=None) sub_group_size=1000000000
[2026-01-02 15:46:55,971] [INFO] [config.py:1003:print]   zero_optimization_stage ...... 2
[2026-01-02 15:47:00,000] [INFO] [logging.py:128:log_dist] [Rank 0] step=10, skipped=6, lr=[9.6e-06, 9.6e-06], \
mom=[(0.9, 0.95), (0.9, 0.95)]
[2026-01-02 15:47:00,100] [INFO] [timer.py:199:stop] epoch=0/micro_step=10/global_step=10, \
RunningAvgSamplesPerSec=173.4, CurrSamplesPerSec=171.9, MemAllocated=3.5GB, MaxMemAllocated=22.5GB
[2026-01-02 15:47:10,500] [INFO] [logging.py:128:log_dist] [Rank 0] step=20, skipped=6, lr=[9.5e-06, 9.5e-06], \
mom=[(0.9, 0.95), (0.9, 0.95)]
[2026-01-02 15:47:10,600] [INFO] [timer.py:199:stop] epoch=0/micro_step=20/global_step=20, \
RunningAvgSamplesPerSec=172.6, CurrSamplesPerSec=171.4, MemAllocated=3.5GB, MaxMemAllocated=22.5GB
[2026-01-02 15:48:44,459] [INFO] [launch.py:460:main] Process 73584 exits successfully.
"""


def beside_deepspeed(printed: Callable[[int], str], prefix: str = "") -> str:
    """A log in which DeepSpeed logs each fourth of twelve steps, and a program prints a text in each step."""
    log = "[2026-01-02 15:00:{:02},000] [INFO] [logging.py:128:log_dist] [Rank 0] step={}, skipped=0, lr=[0.5], mom=[9]"
    lines = [log.format(0, 0)]
    for step in range(1, 13):
        lines += [log.format(step, step)] if step % 4 == 0 else []
        lines += [printed(step)]
    return "".join(f"{prefix}{line}\n" for text in lines for line in text.splitlines())


PIPELINE = """\
steps: 10 loss: 8.2041 iter time (s): 1.204 samples/sec: 26.5
steps: 20 loss: 8.1 iter time (s): 1.2 samples/sec: 26.6
"""

TRAINER_STATE: dict[str, Any] = {
    "best_metric": None,
    "epoch": 0.8,
    "global_step": 20,
    "log_history": [
        {"epoch": 0.4, "grad_norm": 1.9, "learning_rate": 4.9e-4, "loss": 2.1, "num_tokens": 9_000.0, "step": 10},
        {"epoch": 0.4, "eval_loss": 2.0, "eval_runtime": 3.1, "eval_mean_token_accuracy": 0.5, "step": 10},
        {"epoch": 0.8, "grad_norm": 1.7, "learning_rate": 4.8e-4, "loss": 1.9, "num_tokens": 18_000.0, "step": 20},
        {"epoch": 0.8, "step": 20, "total_flos": 1e15, "train_loss": 2.0, "train_runtime": 60.5,
         "train_samples_per_second": 12.5},
    ],
    "logging_steps": 10,
    "max_steps": 20,
    "num_train_epochs": 1,
    "train_batch_size": 4,
}  # fmt: skip

PRINTED = """\
  5%|5         | 1/20 [00:01<00:20]\r{'loss': 2.1, 'grad_norm': 1.9, 'learning_rate': 0.00049, 'epoch': 0.4}
{'eval_loss': '2.0', 'eval_runtime': '3.1', 'epoch': '0.4'}
{'loss': '1.9', 'grad_norm': 'nan', 'learning_rate': '0.00048', 'epoch': '0.8'}
{'train_runtime': 60.5, 'train_samples_per_second': 12.5, 'train_loss': 2.0, 'epoch': 0.8}
"""

LIGHTNING = """\
epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss
,0.001,9,,,
0,,9,,2.5,
0,,9,,,2.4
1,,19,,2.3,
1,,19,2.35,,
1,,19,,,2.2
"""

WANDB_CHART = """\
"Step","zero3 - 8 GPUs - train/loss","zero3 - 8 GPUs - train/loss__MIN","zero3 - 8 GPUs - train/loss__MAX",\
"ddp - train/loss","ddp - train/loss__MIN","ddp - train/loss__MAX"
"1","3.5","3.5","3.5","","",""
"2","3.0","2.5","3.5","3.25","3.25","3.25"
"3","","","","3.0","3.0","3.0"
"""

WANDB_HISTORY = [
    {
        "_step": number,
        "_runtime": seconds,
        "_timestamp": 1.7e9 + seconds,
        "train/global_step": step,
        name: loss,
        "_wandb": {"runtime": 5},
    }
    for number, seconds, step, name, loss in (
        (0, 5.5, 10, "train/loss", 3.5),
        (1, 7.0, 10, "eval/loss", 3.25),
        (2, 9.0, 20, "train/loss", "NaN"),
    )
]

AUTOMODEL = [
    {
        "step": number,
        "epoch": 0,
        "timestamp": f"2026-04-01T16:05:{18 + number}.500Z",
        "loss": 4.5 - number,
        "grad_norm": 4.0,
        "lr": 1e-4,
        "mem": 47.5,
        "tps": 1_000.0,
        "tps_per_gpu": 125.0,
        "mfu": 0.28,
        "num_tokens_per_step": 400,
        "num_label_tokens": 150,
    }
    for number in range(3)
]

IN_STEPS = {"start_step": 1, "end_step": 10, "step_interval": 5}
GOLDEN = {
    "lm loss": {**IN_STEPS, "values": {"1": 10.5, "5": 10.25, "10": 9.5}},
    "iteration-time": {**IN_STEPS, "values": {"1": "nan", "5": 0.25, "10": 0.2}},
    "mem-max-allocated-bytes": {**IN_STEPS, "values": {"1": 3.0e9, "10": 3.5e9}},
}
OLD_GOLDEN = {
    "lm loss": {"start_step": 0, "end_step": 15, "step_interval": 5, "values": [10.5, 10.25, 9.5]},
    "num-zeros": {"start_step": 0, "end_step": 10, "step_interval": 5, "values": [2173.0, 2276.0]},
    "damaged": {"start_step": 0, "end_step": 10, "step_interval": 5, "values": [[1.0], [2.0]]},
    "iteration_timing_avg": 0.119,
}

SWIFT: list[dict[str, Any]] = [
    {"loss": 2.5, "grad_norm": 1.5, "epoch": 0.5, "global_step/max_steps": "5/10", "percentage": "50.00%",
     "elapsed_time": "1m 15s", "remaining_time": "1m 15s", "memory(GiB)": 15.5, "train_speed(s/it)": 15.0},
    {"eval_loss": 2.25, "epoch": 1.0, "global_step/max_steps": "10/10", "percentage": "100.00%",
     "elapsed_time": "1h 2m 3s", "remaining_time": "0s", "memory(GiB)": 16.0},
    {"train_runtime": 3723.5, "train_loss": 9.5, "epoch": 1.0, "global_step/max_steps": "10/10",
     "elapsed_time": "1h 2m 3s", "remaining_time": "0s", "memory(GiB)": 16.0},
    {"best_metric": 2.25, "global_step": 10, "log_history": [{"loss": 2.5}]},
]  # fmt: skip
FACTORY: list[dict[str, Any]] = [
    {"current_steps": 10, "total_steps": 20, "loss": 2.5, "eval_loss": None, "percentage": 50.0,
     "elapsed_time": "23:59:50", "remaining_time": "1 day, 0:00:10", "throughput": 9.5, "total_tokens": 640,
     "vram_allocated": 21.5, "vram_reserved": 24.0},
    {"current_steps": 20, "total_steps": 20, "loss": 2.25, "percentage": 100.0,
     "elapsed_time": "1 day, 0:00:10", "remaining_time": "0:00:00", "total_tokens": 0},
    {"current_steps": 20, "total_steps": 20, "percentage": 100.0,
     "elapsed_time": "1 day, 0:00:12", "remaining_time": "0:00:00", "throughput": "0.00"},
]  # fmt: skip

# One row per value, as MLflow exports it. The times are in milliseconds.
MLFLOW = """\
run_id,key,value,step,timestamp
a,loss,3.5,10,1767225615000
a,loss,3.25,20,1767225630000
b,loss,4.5,10,1767225615000
a,lr,0.5,10,1767225615500
a,lr,0.25,20,1767225630500
a,eval_loss,3.75,20,1767225631000
a,system/cpu_utilization_percentage,99.5,0,1767225615500
"""

LOSSES = "1 8.049097061157227\n2 7.75183629989624\n3 7.032886028289795\n"


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_csv(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


TEXTS = {
    "mlperf.txt": mlperf(),
    "bert.txt": mlperf("bert"),
    "modded.txt": modded(),
    "nanogpt.txt": NANOGPT,
    "llm_c.log": LLM_C,
    "torchtitan.log": TORCHTITAN,
    "deepspeed.log": DEEPSPEED,
    "pipeline.log": PIPELINE,
    "printed_losses.log": beside_deepspeed(lambda step: f"step {step} loss {step / 8}"),
    "mlflow.csv": MLFLOW,
    "logging.jsonl": json_lines(SWIFT),
    "printed.log": PRINTED,
    "trainer_state.json": json.dumps(TRAINER_STATE, indent=2),
    "metrics.csv": LIGHTNING,
    "wandb_export.csv": WANDB_CHART,
    "history.jsonl": json_lines(WANDB_HISTORY),
    "history.csv": as_csv(WANDB_HISTORY),
    "automodel.jsonl": json_lines(AUTOMODEL),
    "golden_values.json": json.dumps(GOLDEN),
    "old_golden_values.json": json.dumps(OLD_GOLDEN, indent=1),
    "losses.txt": LOSSES,
    "run-ddp-tag-train_loss.csv": "Wall time,Step,Value\n1700000000.5,1,3.5\n1700000002.0,2,3.25\n",
    "any.csv": "Step;Train Loss;peak_memory_allocated (GiB);note\n1;3.5;2.5;a\n2;3.25;2.5;b\n",
    "rows.json": json.dumps({"model": "gpt2", "rows": [{"step": 1, "loss": 3.5}, {"step": 2, "loss": 3.25}]}),
    "columns.json": json.dumps({"step": [1, 2, 3], "loss": [3.5, None, 3.0], "betas": [0.9, 0.95]}),
    "pandas.json": json.dumps({"step": {"0": 1, "1": 2}, "val_loss": {"0": 3.5, "1": 3.0}}),
}


def write(folder_: Path, name: str, text: str | bytes) -> Path:
    path = folder_ / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture
def runs_of(tmp_path: Path) -> Callable[..., list[PublicRun]]:
    """Write a text to a file, and return the runs that are read from it."""

    def runs_of_text(text: str | bytes, name: str = "log.txt") -> list[PublicRun]:
        return [run for run, _ in imported.read([write(tmp_path, name, text)])]

    return runs_of_text


@pytest.fixture
def run_of(runs_of: Callable[..., list[PublicRun]]) -> Callable[..., PublicRun]:
    """Write a text to a file, and return the only run that is read from it."""

    def run_of_text(text: str | bytes, name: str = "log.txt") -> PublicRun:
        (run,) = runs_of(text, name)
        return run

    return run_of_text


def written(run: PublicRun, to: Path) -> Path:
    """Write a run to a folder, and return the path of its file."""
    folder.write([run], to)
    return folder.path_of(to, run.name)


def columns(run: PublicRun, kind: str = "training") -> dict[str, Any]:
    series = getattr(run, kind)
    return {} if series is None else dict(series.columns)


# ---------------------------------------------------------------- the formats


def test_mllog(run_of):
    run = run_of(mlperf())
    assert (run.log_format, run.ending, run.marks) == ("mllog", "finished", [])
    assert columns(run) == {
        "samples": [4000, 8000, 8000], "seconds": [2.0, 4.0, 4.0], "loss": [3.5, None, 2.5],
        "samples_per_second": [None, 2000.0, None],
    }  # fmt: skip
    assert columns(run, "evaluation") == {"samples": [4000, 8000], "seconds": [3.0, 5.5], "evaluation_loss": [0.9, 0.8]}
    assert run.totals == {"seconds": 6.0, "samples": 8000}
    setting = run.setting
    assert setting.benchmark == "MLPerf Training, llama2_70b_lora, closed division"
    assert (setting.submitter, setting.system, setting.global_batch_size) == ("A <b>company</b>", "8 x H100", 400)
    assert (setting.seed, setting.learning_rate, setting.num_gpus, setting.model) == (11, 3e-4, None, None)


@pytest.mark.parametrize(
    ("benchmark", "name"), [("bert", "accuracy"), ("gpt3", "evaluation_loss"), ("a new one", "eval_accuracy")]
)
def test_what_mlperf_calls_accuracy_depends_on_the_benchmark(benchmark, name, run_of):
    run = run_of(mlperf(benchmark))
    assert columns(run, "evaluation")[name] == [0.9, 0.8]
    assert columns(run, "evaluation")["samples"] == [4000, 8000]


def test_an_mlperf_run_may_miss_its_target_or_end_early(run_of):
    assert run_of(mlperf(status="aborted")).ending == "missed its target"
    assert run_of(mlperf(status=None)).ending == "ended early"
    assert run_of(mlperf(status="strange")).ending == "unknown"


def test_a_public_log_of_mlperf():
    ((run, not_read),) = imported.read([JUNIPER])
    assert (run.ending, run.marks, not_read, run.setting.seed) == ("finished", [], [], 2029705370)
    assert (run.setting.submitter, run.setting.adapter) == ("Juniper Networks", "LoRA, rank 16, alpha 32")
    assert (len(run.training or ()), len(run.evaluation or ())) == (46, 7)
    losses = [
        json.loads(line.removeprefix(":::MLLOG "))["value"]
        for line in JUNIPER.read_text().splitlines()
        if '"train_loss"' in line
    ]
    assert columns(run)["loss"] == losses
    assert columns(run, "evaluation")["evaluation_loss"][-1] == 0.9246053695678711
    assert run.totals == {"seconds": 6916.764, "samples": 3840}


def test_modded_nanogpt(run_of):
    run = run_of(modded())
    assert (run.log_format, run.ending, run.marks) == ("nanogpt", "finished", [])
    assert columns(run) == {"step": [1, 2, 3, 4], "seconds": [0.226, 0.452, 0.678, 0.904]}
    evaluation = {"step": [0, 4], "seconds": [0.0, 0.909], "evaluation_loss": [10.8311, 3.2784]}
    assert columns(run, "evaluation") == evaluation
    assert run.totals == {"peak_allocated_bytes": 36347 << 20, "peak_reserved_bytes": 52032 << 20}
    assert run.setting.versions == {"python": "3.12.3", "torch": "2.11.0+cu130", "cuda": "13.0"}
    assert (run.setting.gpu, run.setting.num_gpus) == ("NVIDIA H100 80GB HBM3", None)
    assert run.setting.other == {"GPUs that nvidia-smi lists": 2}
    assert "import torch" not in folder.text_of(run)
    assert run_of(modded(last=3)).ending == "ended early"


def test_nanogpt(run_of):
    run = run_of(NANOGPT)
    assert run.ending == "unknown"
    assert columns(run)["loss"] == [10.9886, 9.6211, 9.01]
    assert columns(run)["seconds_per_step"] == pytest.approx([31.41041, 0.0441, 0.0443])
    assert columns(run, "evaluation")["evaluation_loss"] == [10.9898, 9.12]
    assert columns(run_of(LLM_C)) == {
        "step": [0, 1], "loss": [10.965596, 10.814037], "learning_rate": [None, 0.0001], "gradient_norm": [None, 2.5]
    }  # fmt: skip
    assert columns(run_of(LLM_C), "evaluation") == {"step": [0, 2], "evaluation_loss": [10.968871, 10.7]}


@pytest.mark.parametrize("color", ["", "\x1b[31m"])
def test_torchtitan(color, run_of):
    text = TORCHTITAN.replace("step:", f"{color}step:").replace("loss:", f"{color}loss:")
    run = run_of(text)
    assert (run.log_format, run.ending, run.marks) == ("torchtitan", "finished", [])
    assert columns(run)["step"] == [1, 2, 3]
    assert columns(run)["seconds"] == [1.0, 2.25, 4.0]
    assert columns(run)["loss"] == [8.0491, 7.75184, 7.1]
    assert columns(run)["peak_reserved_bytes"] == [GIB // 2] * 3
    assert columns(run)["tokens_per_second_per_gpu"] == [8213, 18213, 18213]
    assert columns(run)["mfu_percent"] == [0.06, None, 0.06]
    assert columns(run, "evaluation")["evaluation_loss"] == [7.7]
    setting = run.setting
    assert (setting.model, setting.parameters, setting.gpu) == ("llama3 debugmodel", 6_139_136, "NVIDIA H100")
    assert (setting.engine, setting.strategy, setting.activation_checkpointing) == ("FSDP2", "fsdp2", True)
    assert (setting.micro_batch_size, setting.global_batch_size, setting.sequence_length) == (8, 64, 2048)
    assert (setting.planned_steps, setting.warmup_steps) == (3, 2)
    assert run_of(text[: text.index("[titan] 2026-05-30 12:00:06")]).ending == "ended early"


def test_losses_of_torchtitan(run_of, tmp_path):
    assert columns(run_of(LOSSES))["step"] == [1, 2, 3]
    assert columns(run_of(LOSSES))["loss"] == [8.049097061157227, 7.75183629989624, 7.032886028289795]
    assert "line 3" in refusal(formats.read, write(tmp_path, "gap.txt", LOSSES.replace("\n3", "\n4")))


def test_deepspeed(run_of):
    run = run_of(DEEPSPEED)
    assert (run.log_format, run.ending) == ("deepspeed", "finished")
    assert run.marks == ["seconds count from the first logged entry"]
    assert columns(run) == {
        "step": [10, 20],
        "seconds": [0.0, 10.5],
        "learning_rate": [9.6e-06, 9.5e-06],
        "samples_per_second": [171.9, 171.4],
        "allocated_bytes": [GIB * 7 // 2] * 2,
        "peak_allocated_bytes": [GIB * 45 // 2] * 2,
        "skipped_steps": [6, 6],
        "epoch": [0, 0],
    }
    assert run.totals == {
        "peak_allocated_bytes": 4 * GIB, "peak_reserved_bytes": 6 * GIB, "host_bytes": GIB * 63 // 2
    }  # fmt: skip
    setting = run.setting
    assert (setting.strategy, setting.offload, setting.precision) == ("zero2", "optimizer states on cpu", "bf16")
    assert (setting.num_gpus, setting.micro_batch_size, setting.global_batch_size) == (8, 2, 32)
    assert setting.versions == {"deepspeed": "0.16.2"}
    assert columns(run_of(PIPELINE)) == {
        "step": [10, 20], "seconds_per_step": [1.204, 1.2], "loss": [8.2041, 8.1], "samples_per_second": [26.5, 26.6]
    }  # fmt: skip


def test_two_engines_in_one_program_log_the_same_steps(run_of):
    line = "[2026-01-02 15:47:00,000] [INFO] [logging.py:128:log_dist] [Rank 0] step={}, skipped=0, lr=[{}], mom=[9]\n"
    run = run_of("".join(line.format(step, rate) for step in (10, 20) for rate in (0.5, 0.25)))
    assert columns(run)["learning_rate"] == [0.5, 0.25, 0.5, 0.25]
    assert any("a step is logged more than once (2 times" in mark for mark in run.marks)


@pytest.mark.parametrize(
    ("printed", "prefix"),
    [
        (lambda step: f"step {step} loss {step / 8}", ""),
        (lambda step: f"step {step} loss {step / 8}", "worker-1: "),
        (lambda step: f"[Step {step}/12] Train Loss: tensor({step / 8}, device='cuda:0')", "[rank0]:"),
        (lambda step: f"global_step = {step - 1}, loss = {step / 8}", ""),  # counts from 0
        (lambda step: f" iteration {step:8}/ 12 | time (ms): 7.5 | lm loss: {step / 8:E} | loss scale: 1.0 |", ""),
        (lambda step: f"step {step} loss {step / 8}\nvalidation at step {step} | lm loss value: 7.5 | PPL: 9.5", ""),
    ],
)
def test_losses_that_a_program_prints_beside_deepspeeds_lines(printed, prefix, run_of):
    run = run_of(beside_deepspeed(printed, prefix))
    assert (run.log_format, columns(run)["step"]) == ("deepspeed", list(range(1, 13)))
    assert columns(run)["loss"] == [step / 8 for step in range(1, 13)]
    assert columns(run)["learning_rate"] == [None, None, None, 0.5] * 3
    assert columns(run)["seconds"] == [None, None, None, 0.0, None, None, None, 4.0, None, None, None, 8.0]
    if "validation" in printed(1):
        assert columns(run, "evaluation")["evaluation_loss"] == [7.5] * 12
    assert not any("missing" in mark or "left out" in mark for mark in run.marks)


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        (lambda step: f"step {4 * step} loss 2.5", "counts its steps differently (12 times"),  # of micro batches
        (lambda step: f"step {step % 4} loss 2.5", "counts its steps differently (12 times"),  # in each epoch
        (lambda step: "loss: 2.5", "without the number of a step were left out (12 times"),
    ],
)
def test_printed_losses_that_belong_to_no_step_of_deepspeed_are_in_the_verdict(printed, message, tmp_path):
    ((run, not_read),) = imported.read([write(tmp_path, "log.txt", beside_deepspeed(printed))])
    assert columns(run)["step"] == [4, 8, 12]
    assert "loss" not in columns(run)
    assert any(message in text for text in not_read)


def test_printed_losses_without_a_step_of_deepspeed_may_have_other_steps(tmp_path):
    text = beside_deepspeed(lambda step: "").partition("\n")[0] + "\nstep 40 loss 2.5\nstep 80 loss 2.25\n"
    ((run, not_read),) = imported.read([write(tmp_path, "log.txt", text)])
    assert (columns(run)["step"], columns(run)["loss"]) == ([40, 80], [2.5, 2.25])
    assert any("may have other steps than the optimizer" in text for text in not_read)


def test_what_the_trainer_prints_beside_deepspeeds_lines(tmp_path):
    text = DEEPSPEED.rpartition("[2026")[0] + beside_deepspeed(
        lambda step: f"{{'loss': {step / 8}, 'epoch': {step / 4}}}"
    )
    ((run, not_read),) = imported.read([write(tmp_path, "log.txt", text)])
    assert columns(run)["loss"] == [step / 8 for step in range(1, 13)]
    assert (run.setting.engine, run.setting.strategy, run.setting.num_gpus) == ("DeepSpeed", "zero2", 8)
    assert any("DeepSpeed's lines about steps were left out" in text for text in not_read)


def test_one_of_several_machines_fails(run_of):
    log = "[2026-01-02 15:45:26,832] [INFO] [launch.py:460:main] Process 7 {}\n"
    text = DEEPSPEED.rpartition("[2026")[0] + log.format("exits with return code = 1")
    assert run_of(text + log.format("exits successfully.")).ending == "ended early"


def test_a_host_before_each_line_of_nanogpt(run_of):
    lines = NANOGPT.splitlines(keepends=True)
    for prefix in ("node-1: ", "[rank0]:"):
        assert columns(run_of("".join(prefix + line for line in lines))) == columns(run_of(NANOGPT))


@pytest.mark.parametrize("indent", [None, 2])
def test_trainer_state(indent, run_of):
    run = run_of(json.dumps(TRAINER_STATE, indent=indent), "trainer_state.json")
    assert (run.log_format, run.ending, run.marks) == ("trainer", "finished", [])
    assert columns(run)["tokens"] == [9000.0, 18000.0]
    assert columns(run)["loss"] == [2.1, 1.9]
    assert columns(run, "evaluation")["evaluation_loss"] == [2.0]
    assert run.totals == {"seconds": 60.5, "samples_per_second": 12.5, "mean_training_loss": 2.0}
    assert (run.setting.planned_steps, run.setting.program) == (20, "transformers Trainer")
    checkpoint = TRAINER_STATE | {"max_steps": 100, "log_history": TRAINER_STATE["log_history"][:3]}
    assert run_of(json.dumps(checkpoint, indent=indent)).ending == "ended early"
    stopped = run_of(json.dumps(TRAINER_STATE | {"max_steps": 100}, indent=indent))
    assert (stopped.ending, stopped.marks) == (
        "finished",
        ["the Trainer stopped at step 20 of 100, and wrote its summary"],
    )


def test_a_trainer_that_logs_the_time_of_each_step(run_of):
    """With include_num_input_tokens_seen, every loss has a train_runtime, like the summary at the end."""
    example = Path(__file__).parents[2] / "docs" / "examples" / "two_processes" / "trainer_state.json"
    run = run_of(example.read_text(), "trainer_state.json")
    assert (len(run.training), len(run.evaluation), run.ending) == (12, 3, "finished")
    assert run.training.columns["seconds"][-1] > run.training.columns["seconds"][0] > 0


def test_what_the_trainer_prints(runs_of):
    first, second = runs_of(PRINTED * 2)
    assert columns(first) == columns(second)
    assert columns(first)["loss"] == [2.1, 1.9]
    assert first.training.not_finite == {"gradient_norm": [1]}
    assert columns(first, "evaluation")["evaluation_loss"] == [2.0]
    assert (first.ending, first.totals["seconds"]) == ("finished", 60.5)


def test_lightning(run_of):
    run = run_of(LIGHTNING, "metrics.csv")
    assert run.log_format == "lightning"
    assert columns(run)["loss"] == [None, 2.5, 2.3, None]
    assert columns(run, "evaluation") == {"step": [9, 19], "evaluation_loss": [2.4, 2.2], "epoch": [0, 1]}


def test_a_chart_of_wandb(runs_of):
    zero3, ddp = runs_of(WANDB_CHART, "wandb_export.csv")
    assert (zero3.name, ddp.name) == ("wandb_export-zero3-8-GPUs", "wandb_export-ddp")
    assert columns(zero3) == {"step": [1, 2], "loss": [3.5, 3.0], "_step": [1, 2]}
    assert columns(ddp)["loss"] == [3.25, 3.0]
    assert any("means over several steps" in mark for mark in zero3.marks)
    assert not any("means over several steps" in mark for mark in ddp.marks)


@pytest.mark.parametrize("name", ["history.jsonl", "history.csv"])
def test_a_history_of_wandb(name, run_of):
    run = run_of(TEXTS[name], name)
    assert run.log_format == "wandb history"
    assert columns(run)["step"] == [10, 20]
    assert columns(run)["seconds"] == [5.5, 9.0]
    assert (columns(run)["loss"], run.training.not_finite) == ([3.5, None], {"loss": [1]})
    assert columns(run, "evaluation")["evaluation_loss"] == [3.25]
    without = [{k: v for k, v in row.items() if k != "train/global_step"} for row in WANDB_HISTORY]
    marked = run_of(json_lines(without), "history.jsonl")
    assert columns(marked)["step"] == [0, 2]
    assert any("Weights & Biases counted" in mark for mark in marked.marks)


def test_a_table_of_runs_of_wandb_is_refused(tmp_path):
    path = write(tmp_path, "runs.csv", '"Name","State","Created","train/loss"\n"a","finished","2026","3.5"\n')
    assert "Export the history of each run" in refusal(formats.read, path)


def test_nemo_automodel(run_of):
    run = run_of(json_lines(AUTOMODEL), "gpt_h100.jsonl")
    assert run.log_format == "nemo automodel"
    assert columns(run)["seconds"] == [0.0, 1.0, 2.0]
    assert columns(run)["peak_allocated_bytes"] == [GIB * 95 // 2] * 3
    assert columns(run)["tokens_per_second"] == [1000.0] * 3


def test_golden_values_of_megatron(run_of):
    run = run_of(json.dumps(GOLDEN), "golden_values_dev_dgx_h100.json")
    assert run.log_format == "megatron"
    assert columns(run) == {
        "step": [1, 5, 10], "seconds_per_step": [None, 0.25, 0.2], "loss": [10.5, 10.25, 9.5],
        "peak_allocated_bytes": [3.0e9, None, 3.5e9],
    }  # fmt: skip
    assert run.training.not_finite == {"seconds_per_step": [0]}
    old = run_of(json.dumps(OLD_GOLDEN, indent=1))
    assert columns(old) == {"step": [0, 5, 10], "loss": [10.5, 10.25, 9.5], "num-zeros": [2173.0, 2276.0, None]}
    assert old.setting.other == {"iteration_timing_avg": 0.119}
    assert any("the values of damaged were left out" in mark for mark in old.marks)


def test_any_named_columns(run_of):
    run = run_of(TEXTS["any.csv"], "any.csv")
    assert columns(run) == {"step": [1, 2], "loss": [3.5, 3.25], "peak_allocated_bytes": [GIB * 5 // 2] * 2}
    assert run.marks == ["columns without numbers were left out: note"]
    rows = run_of(TEXTS["rows.json"], "rows.json")
    assert (columns(rows)["loss"], rows.setting.other) == ([3.5, 3.25], {"model": "gpt2"})
    by_column = run_of(TEXTS["columns.json"], "columns.json")
    assert columns(by_column) == {"step": [1, 3], "loss": [3.5, 3.0]}  # a row with nothing but a step is no step
    assert any("betas" in mark for mark in by_column.marks)
    assert columns(run_of(TEXTS["pandas.json"]), "evaluation") == {"step": [1, 2], "evaluation_loss": [3.5, 3.0]}


def test_the_first_of_two_columns_with_one_meaning_counts(run_of):
    run = run_of("step,train_loss,loss,loss,mem GB\n1,3.5,4.5,5.5,2\n", "any.csv")
    assert columns(run) == {"step": [1], "loss": [3.5], "loss (2)": [4.5], "loss (2) (2)": [5.5], "mem GB": [2]}


def test_ms_swift(run_of):
    run = run_of(json_lines(SWIFT), "logging.jsonl")
    assert (run.ending, run.marks, run.setting.planned_steps) == ("finished", [], 10)
    assert columns(run) == {
        "step": [5], "seconds": [75.0], "loss": [2.5], "gradient_norm": [1.5], "peak_reserved_bytes": [GIB * 31 // 2],
        "epoch": [0.5], "train_speed(s/it)": [15.0],
    }  # fmt: skip
    evaluation = {"step": [10], "seconds": [3723.0], "evaluation_loss": [2.25], "epoch": [1.0]}
    assert columns(run, "evaluation") == evaluation | {"eval_memory(GiB)": [16.0]}
    assert (run.totals, run.setting.other["best_metric"]) == ({"seconds": 3723.5, "mean_training_loss": 9.5}, 2.25)
    printed = run_of("".join(f"{row}\n" for row in SWIFT[:3]))
    assert (printed.log_format, printed.ending, columns(printed)["step"]) == ("trainer output", "finished", [5])
    assert (columns(printed)["seconds"], printed.setting.planned_steps) == ([75.0], 10)


def test_llama_factory(run_of):
    run = run_of(json_lines(FACTORY), "trainer_log.jsonl")
    assert (run.ending, run.marks, run.setting.planned_steps) == ("finished", [], 20)
    assert columns(run) == {
        "step": [10, 20], "tokens": [640, None], "seconds": [86390.0, 86410.0], "loss": [2.5, 2.25],
        "peak_allocated_bytes": [GIB * 43 // 2, None], "peak_reserved_bytes": [GIB * 24, None],
        "throughput": [9.5, None],
    }  # fmt: skip
    in_unknown_unit = [row | {"elapsed_time": 7, "remaining_time": 7} for row in FACTORY[:2]]
    assert "seconds" not in columns(run_of(json_lines(in_unknown_unit), "any.jsonl"))


@pytest.mark.parametrize("name", ["mlflow.csv", "any.jsonl", "any.json"])
def test_a_table_with_one_row_per_value(name, runs_of):
    rows = [row | {"value": float(row["value"])} for row in csv.DictReader(io.StringIO(MLFLOW))]
    text = {"mlflow.csv": MLFLOW, "any.jsonl": json_lines(rows), "any.json": json.dumps(rows)}[name]
    a, b = runs_of(text, name)
    assert columns(a) == {"step": [10, 20], "seconds": [0.0, 15.0], "loss": [3.5, 3.25], "learning_rate": [0.5, 0.25]}
    assert columns(a, "evaluation") == {"step": [20], "seconds": [15.0], "evaluation_loss": [3.75]}
    assert columns(b) == {"step": [10], "seconds": [0.0], "loss": [4.5]}
    assert any("metrics of the system were left out" in mark for mark in a.marks)


def test_a_long_table_with_values_that_repeat_or_are_not_finite(runs_of, tmp_path, monkeypatch):
    text = "Step,Tag,Value,is_nan\n1,Loss,3.5,0\n2,Loss,0,1\n1,Loss,4.5,0\n2,Loss,4.25,0\n,Loss,9,0\n"
    first, second = runs_of(text, "any.csv")
    assert (columns(first), first.training.not_finite) == ({"step": [1, 2], "loss": [3.5, None]}, {"loss": [1]})
    assert columns(second) == {"step": [1, 2], "loss": [4.5, 4.25]}
    assert any("without a step" in mark for mark in first.marks)
    monkeypatch.setattr("zero_study.logs.columns.MOST_VALUES", 3)
    assert "more than 3 values" in refusal(imported.read, [write(tmp_path, "long.csv", text)])


def test_a_scalar_that_tensorboard_exported(run_of, tmp_path):
    run = run_of(TEXTS["run-ddp-tag-train_loss.csv"], "run-ddp-tag-train_loss.csv")
    assert columns(run) == {"step": [1, 2], "seconds": [0.0, 1.5], "loss": [3.5, 3.25]}
    path = write(tmp_path, "renamed.csv", TEXTS["run-ddp-tag-train_loss.csv"])
    assert "-tag-NAME.csv" in refusal(formats.read, path)


# ---------------------------------------------------------------- TensorBoard


def event_file(folder_: Path) -> bytes:
    """The event file of a training: scalars as numbers and as tensors, and a text."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util import tensor_util

    writer = EventFileWriter(str(folder_))
    for step in (10, 20):
        texts = [Summary.Value(tag="args/text_summary", tensor=tensor_util.make_tensor_proto("{}"))]
        losses = [Summary.Value(tag="train/loss", simple_value=4.0 - step / 20)]
        rates = [Summary.Value(tag="train/learning_rate", tensor=tensor_util.make_tensor_proto(0.5))]
        evaluations = [Summary.Value(tag="eval/loss", simple_value=float("nan"))]
        for values in (texts, losses, rates, evaluations):
            writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=values)))
    writer.close()
    (path,) = folder_.glob("*tfevents*")
    return path.read_bytes()


def test_event_files_of_tensorboard(run_of, tmp_path):
    pytest.importorskip("tensorboard")
    content = event_file(tmp_path / "events")
    run = run_of(content, "ddp/events.out.tfevents.1700000000.host.7.0")
    assert (run.name, run.log_format) == ("ddp", "tensorboard")
    assert columns(run) == {"step": [10, 20], "seconds": [0.0, 10.0], "loss": [3.5, 3.0], "learning_rate": [0.5, 0.5]}
    assert run.evaluation.not_finite == {"evaluation_loss": [0, 1]}
    cut_off = run_of(content[:-5], "events.out.tfevents.1")
    assert any("damaged or cut off" in mark for mark in cut_off.marks)
    began = time.monotonic()
    for length in range(0, len(content), 7):
        attempt(write(tmp_path, "cut.tfevents", content[:length]))
        damaged = content[:length] + b"\xff" + content[length + 1 :]
        attempt(write(tmp_path, "damaged.tfevents", damaged))
    assert time.monotonic() - began < 60


def test_scalars_of_tensorboard_by_samples(run_of, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def run_with(*scalars: tuple[str, int, float]) -> PublicRun:
        to = tmp_path / str(len(scalars))
        writer = EventFileWriter(str(to))
        for tag, step, value in scalars:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=1.7e9, step=step, summary=summary))
        writer.close()
        (path,) = to.glob("*tfevents*")
        return run_of(path.read_bytes(), "events.out.tfevents.1")

    scalars: list[tuple[str, int, float]] = []
    for step in (10, 20):
        scalars += [("learning-rate", step, 0.5), ("learning-rate vs samples", 8 * step, 0.5)]
        scalars += [("iteration-time", step, 0.25), ("lm loss", step, 5.0), ("lm loss vs samples", 8 * step, 5.0)]
        scalars += [("lm loss vs gigaflos", 999 * step, 5.0), ("tokens vs gigaflos", 999 * step, 5.0)]
    run = run_with(*scalars, ("lm loss validation", 20, 6.0))
    values = {"seconds_per_step": [0.25] * 2, "loss": [5.0] * 2, "learning_rate": [0.5] * 2}
    assert columns(run) == {"step": [10, 20], "samples": [80, 160], "seconds": [0.0] * 2, **values}
    assert columns(run, "evaluation")["evaluation_loss"] == [6.0]
    assert "values by gigaflos were left out (2 times, first at record 8)" in run.marks
    of_deepspeed = run_with(
        *[(f"Train/Samples/{name}", samples, 0.5) for samples in (8, 16) for name in ("lr", "loss")]
    )
    assert columns(of_deepspeed) == {
        "samples": [8, 16], "seconds": [0.0] * 2, "learning_rate": [0.5] * 2, "loss": [0.5] * 2
    }  # fmt: skip


def test_without_tensorboard_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path, "events.out.tfevents.1", b"\x18" + bytes(11) + b"\x09\0brain.Event:2" + bytes(40))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as missing:
        formats.read(path)
    message = describe_missing(missing.value)
    assert message is not None
    assert "tensorboard is not installed. Run `pip install " in message


# ---------------------------------------------------------------- odd and damaged logs


@pytest.mark.parametrize("text", [mlperf(), modded(), NANOGPT, TORCHTITAN, DEEPSPEED])
def test_two_runs_in_one_file_are_two_runs(text, runs_of):
    first, second = runs_of(text * 2)
    assert (first.name, second.name) == ("log-1", "log-2")
    assert (first.setting, first.ending, first.totals) == (second.setting, second.ending, second.totals)
    assert (first.training, first.evaluation, first.marks) == (second.training, second.evaluation, second.marks)
    assert first.source.lines[1] < second.source.lines[0]


def test_the_lines_of_two_runs_are_kept(runs_of):
    first, second = runs_of("step,loss\n1,3.5\n2,3.0\n1,3.25\n2,2.75\n", "any.csv")
    assert (first.source.lines, second.source.lines) == ([2, 3], [4, 5])


def test_a_crashed_run_and_the_next_one_are_two_runs(runs_of):
    first, second = runs_of(mlperf(status=None) + mlperf())
    assert (first.ending, second.ending) == ("ended early", "finished")
    first, second = runs_of(modded(last=3) + modded())
    assert (first.ending, second.ending) == ("ended early", "finished")
    assert columns(first)["step"] == [1, 2, 3]


def test_a_resumed_run_is_marked(run_of):
    run = run_of("step,loss\n10,3.5\n20,3.25\n30,3.0\n20,3.25\n30,3.125\n40,3.0\n", "any.csv")
    assert columns(run)["step"] == [10, 20, 30, 20, 30, 40]
    assert run.marks == ["the steps go back: the training was resumed, or logged out of order (line 5)"]


def test_a_clock_that_jumps_back_is_marked(run_of):
    jumping = mlperf().replace('"time_ms": 14000', '"time_ms": 9000')
    assert any("the clock jumps back" in mark for mark in run_of(jumping).marks)
    run = run_of("step,seconds,loss\n1,5,3\n2,4,3\n3,6,3\n4,5.5,3\n", "any.csv")
    assert "the column seconds fall while the steps rise" in run.marks[0]
    assert columns(run)["seconds (as logged)"] == [5, 4, 6, 5.5]
    assert "seconds" not in columns(run)
    resumed = "".join(f"{n},{n * 9 % 70},{n}\n" for n in range(1, 15))
    run = run_of(f"step,seconds,loss\n{resumed}", "any.csv")
    assert run.marks == ["the clock jumps back (line 9)"]
    assert "seconds" in columns(run)


def test_values_that_are_not_finite_keep_their_place(run_of, tmp_path):
    run = run_of("step,loss,grad_norm\n1,nan,inf\n2,,1\n3,3.5,-Infinity\n4,1e400,2\n", "any.csv")
    assert columns(run)["loss"] == [None, None, 3.5, None]
    assert run.training.not_finite == {"loss": [0, 3], "gradient_norm": [0, 2]}
    assert "loss is not a finite number (2 times, first at line 2)" in run.marks
    assert folder.read(written(run, tmp_path)) == run


def test_a_log_that_is_cut_off_is_marked(run_of):
    assert any("the last line is cut off" in mark for mark in run_of(mlperf()[:-30]).marks)
    cut_off = run_of(modded(last=3)[:-8])
    assert columns(cut_off)["step"] == [1, 2]
    assert cut_off.marks == ["the last line is cut off (line 13)"]
    assert "its last value may be cut off" in run_of("step,loss\n1,3.5\n2,3.2", "any.csv").marks[0]
    assert "the last line is cut off" in run_of("step,loss\n1,3.5\n2", "any.csv").marks[0]
    assert "the last line is cut off" in run_of('{"step": 1, "loss": 3.5}\n{"step": 2, "lo', "any.jsonl").marks[0]


def test_large_numbers_and_strange_texts_are_kept_as_data(run_of):
    digits = "9" * 5000
    row = f'"step": 1, "loss": {digits}, "tokens": 12345678901234567890, "<b>\\u001b[31m": 1, "x": "a\\nb"'
    run = run_of(f"{{{row}}}\n")
    assert run.training.not_finite == {"loss": [0]}
    assert columns(run)["tokens"] == [12345678901234567890.0]
    assert "<b>\\x1b[31m" in columns(run)
    listed = run_of(mllog("submission_org", "\x1b[31m<script>\u202eevil\n", 1) + mllog("seed", 10**400, 1) + mlperf())
    assert listed.setting.submitter is None  # two values
    assert folder.text_of(run).isascii()


def test_what_a_log_states_twice_differently_is_not_kept(run_of):
    run = run_of(mllog("seed", 10, 1_000) + mlperf())
    assert run.setting.seed is None
    assert run.marks == ["the log states several values of seed, so none of them was imported"]


def test_a_value_that_a_field_cannot_have_is_kept_in_the_words_of_the_log(run_of):
    run = run_of(mlperf().replace('"value": 400', '"value": -400'))
    assert (run.setting.global_batch_size, run.setting.other["global_batch_size"]) == (None, -400)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.txt", "", "is empty"),
        ("blank.txt", " \n\n", "is empty"),
        ("picture.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "neither text"),
        ("poem.txt", "No log, only a text.\n" * 100, "the format of none of its lines"),
        ("sales.csv", "shop,price\na,3\n", "the format of none of its lines"),
        ("sales.jsonl", '{"shop": 1, "price": 2}\n', "its columns: 'shop', 'price'. Rename"),
        ("cut.json", json.dumps(TRAINER_STATE)[:-40], "ends in the middle"),
        ("state.json", json.dumps(TRAINER_STATE | {"log_history": []}), "no step of a training"),
        ("deep.json", '{"step": ' + "[" * 100_000, "nested too deeply"),
        ("deep.jsonl", '{"step": 1, "loss": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}\n", "nested too deeply"),
        ("header.csv", "step,loss\n", "no step of a training"),
        ("quote.csv", 'step,loss\n1,"' + "3" * 200_000, "is damaged"),
        ("start.txt", mllog("run_start", None, 1), "neither a loss nor an evaluation"),
        ("empty.json", "{}", "none of its columns"),
        ("generated.json", '{"0": {"input_prompt": "Hello", "logprobs": [1, 2]}}', "none of its columns"),
        ("numbers.json", "[1, 2, 3]", "the format of none of its lines"),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_refused(name, text, message, tmp_path):
    path = write(tmp_path, name, text)
    assert message in refusal(imported.read, [path])
    assert len(refusal(imported.read, [path])) < 500 + len(str(path))


def test_what_is_no_file_is_refused(tmp_path):
    assert "No such file" in refusal(imported.read, [tmp_path / "absent"])
    assert "Is a directory" in refusal(imported.read, [tmp_path])


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path, "log.txt", modded())

    def read(*_: Any) -> Any:
        path.write_text(modded() + "\n")
        return [object()]

    monkeypatch.setattr(formats, "recognize", lambda _: formats.NANOGPT._replace(read=read))
    assert "still writing to this file" in refusal(formats.read, path)


def test_a_log_of_too_many_steps_is_thinned(run_of, monkeypatch):
    monkeypatch.setattr(draft, "MOST_ROWS", 10)
    run = run_of("step,loss\n" + "".join(f"{n},{n / 8}\n" for n in range(1, 51)), "any.csv")
    assert columns(run)["step"] == [1, 9, 17, 25, 33, 41, 49, 50]
    assert run.marks == ["only every 8th of the 50 logged training steps was imported, and the last one"]


def test_too_many_columns_and_runs(run_of, tmp_path, monkeypatch):
    monkeypatch.setattr("zero_study.logs.columns.MOST_COLUMNS", 5)
    run = run_of("step,loss," + ",".join(f"x{n}" for n in range(9)) + "\n" + ",".join("1" * 11) + "\n", "any.csv")
    assert list(columns(run)) == ["step", "loss", "x0", "x1", "x2"]
    assert run.marks == ["there are more than 5 columns, or very long names, so some columns were left out"]
    monkeypatch.setattr(draft, "MOST_RUNS", 3)
    path = write(tmp_path, "many.csv", "step,loss\n" + "1,3\n2,3\n" * 4)
    assert "more than 3 times" in refusal(imported.read, [path])


# ---------------------------------------------------------------- fuzz


def attempt(path: Path) -> list[PublicRun]:
    """Import a log. It is refused in one line, or what is written of it can be read again and is safe to show."""
    try:
        result = [run for run, _ in imported.read([path])]
    except Refusal as refused:
        result, message = [], str(refused)
    if not result:
        assert "\n" not in message
    for run in result:
        text = folder.text_of(run)
        assert PublicRun.model_validate(json.loads(text)) == run
        displayed = [*run.marks, run.name, str(run.setting), *columns(run), *columns(run, "evaluation")]
        assert all(each.isprintable() for each in displayed)
        assert run.training is not None or run.evaluation is not None
    return result


SECONDS_PER_ATTEMPT = 2


@pytest.mark.parametrize("places", [100, pytest.param(700, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", TEXTS)
def test_a_log_that_ends_anywhere_is_read_or_refused(name, places, tmp_path):
    content = TEXTS[name].encode()
    whole = attempt(write(tmp_path, name, content))
    assert whole
    for length in range(0, len(content), 1 + len(content) // places):
        runs = attempt(write(tmp_path, name, content[:length]))
        if "csv" in name and b"\n" not in content[:length]:
            continue  # the names of the columns are cut off
        for run, entire in zip(runs, whole, strict=False):
            is_last_sure = not any("its last value may be cut off" in mark for mark in run.marks)
            for kind in ("training", "evaluation"):
                for column, values in columns(run, kind).items():
                    sure = values if is_last_sure else values[:-1]
                    known = columns(entire, kind)[column][: len(sure)]
                    assert len(sure) == len(known)
                    assert all(value in (None, other) for value, other in zip(sure, known, strict=True))


STRANGE = [
    b"nan", b"-inf", b"1e999", b"9" * 400, b"-1", b"0", b"", b"null", b"<script>alert(1)</script>", b"\x1b[31m\x07",
    b"\xff\xfe", b"\0", "\u202e".encode(), b"\r", b"\n", b'"', b"{", b"}", b"[", b",", b";", b"\t", b"'", b"=",
    b"true", b"[" * 200, b'{"a":' * 200, b"1_000", b"0x10", b"1,000.5", b" ", b"%s", b"\\ud800", b"../../etc/passwd",
    b"99999999999999999999", b"step:",
]  # fmt: skip


@given(name=st.sampled_from(sorted(TEXTS)), seed=st.integers(0, 2**32 - 1))
def test_a_scrambled_log_is_read_or_refused(name, seed, tmp_path_factory):
    draw = random.Random(seed)
    content = TEXTS[name].encode()
    for _ in range(draw.randrange(1, 6)):
        place, length = draw.randrange(len(content) + 1), draw.choice((0, 1, 1, 5, 40))
        lines = content.splitlines(keepends=True) or [b""]
        what = draw.randrange(4)
        if what == 0:
            content = content[:place] + draw.choice(STRANGE) + content[place + length :]
        elif what == 1:
            draw.shuffle(lines)
            content = b"".join(lines)
        elif what == 2:
            content = b"".join(line for line in lines for _ in range(draw.choice((0, 1, 1, 1, 2))))
        else:
            content += TEXTS[draw.choice(sorted(TEXTS))].encode()
    began = time.process_time()
    attempt(write(tmp_path_factory.mktemp("fuzz"), name, content))
    assert time.process_time() - began < SECONDS_PER_ATTEMPT


@given(content=st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(content, tmp_path_factory):
    attempt(write(tmp_path_factory.mktemp("bytes"), "log", content))


def test_a_line_of_any_length_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 1000)
    path = write(tmp_path, "log.txt", "x" * 10_000 + "\n" + modded())
    assert [line.number for line in reading.lines(path)][:12] == [1] * 11 + [2]
    assert attempt(path)[0].ending == "finished"


LONG = [
    ("step 1 loss 2 ", DEEPSPEED), ("eval loss ", DEEPSPEED), ("a_a_", DEEPSPEED), ("'elapsed_time': '1", PRINTED),
    ("CUDA capacity: ", TORCHTITAN), ("Model x ", TORCHTITAN), ("step: ", TORCHTITAN), ("step:  1  ", TORCHTITAN),
    ("[config.py:1:print] zero_config . offload_param=device ", DEEPSPEED), ("steps: 1 loss: 2 ", DEEPSPEED),
    ("MA 1 GB ", DEEPSPEED), ("step=1, skipped=1, lr=[", DEEPSPEED), ("|   0  x", NANOGPT), (" ", NANOGPT),
    ("iter 1: loss 2,", NANOGPT), ("step:1/1 a", NANOGPT), ("{'loss': ", PRINTED), ("'a': ", PRINTED), ("\r", PRINTED),
    (':::MLLOG {"a":', mlperf()), (":::MLLOG ", mlperf()), ('{"a":', TEXTS["history.jsonl"]), ("1,", TEXTS["any.csv"]),
]  # fmt: skip


@pytest.mark.parametrize(("repeated", "text"), LONG)
def test_a_long_line_takes_no_time(repeated, text, tmp_path):
    lines = [repeated * ((1 << 20) // len(repeated)), repeated + " " * (1 << 20) + repeated]
    began = time.process_time()
    attempt(write(tmp_path, "log", "\n".join([text, *lines, ""])))
    assert time.process_time() - began < 10


def test_a_document_is_read_in_parts_of_any_size(tmp_path, monkeypatch):
    path = write(tmp_path, "state.json", json.dumps(TRAINER_STATE, indent=3))
    whole = list(json_parts.parts(path))
    for size in (1, 2, 7, 50):
        monkeypatch.setattr(json_parts, "CHUNK", size)
        assert list(json_parts.parts(path)) == whole


@pytest.mark.parametrize("form", ["any.jsonl", "modded.txt", "state.json"])
def test_ten_times_as_many_lines_need_no_more_memory(form, tmp_path, monkeypatch):
    monkeypatch.setattr(draft, "MOST_ROWS", 200)
    monkeypatch.setattr(json_parts, "CHUNK", 1 << 12)
    rows = {
        "any.jsonl": (lambda n: f'{{"step": {n}, "loss": 3.5}}\n', "", ""),
        "modded.txt": (lambda n: f"step:{n}/90000 train_time:{n}ms step_avg:1ms\n", "", ""),
        "state.json": (lambda n: f', {{"step": {n}, "loss": 3.5}}', '{"log_history": [{"step": 0, "loss": 4}', "]}"),
    }
    line, begin, end = rows[form]

    def peak(number: int) -> int:
        path = write(tmp_path, form, begin + "".join(map(line, range(1, number + 1))) + end)
        tracemalloc.start()
        imported.read([path])
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(100)
    few, many = peak(1_000), peak(10_000)
    assert many < 1.3 * few + 100_000


def test_restarts_in_a_file_share_the_memory_of_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(draft, "MOST_ROWS", 200)
    restart = "".join(f"{step},3.5\n" for step in range(1, 1_002))
    runs = [run for run, _ in imported.read([write(tmp_path, "any.csv", "step,loss\n" + 7 * restart)])]
    assert len(runs) == 7
    assert sum(len(run.training) for run in runs) <= 200 + len(runs)  # and the last step of each run
    for run in runs:
        steps = columns(run)["step"]
        assert (steps[0], steps[-1], len(steps) > 10) == (1, 1_001, True)
        assert any("logged training steps was imported, and the last one" in mark for mark in run.marks)


# ---------------------------------------------------------------- the command


def run_command(*words: object) -> int:
    return cli.run(["import", *map(str, words)])


def test_the_command_writes_one_file_per_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("ddp", "zero3"):
        write(tmp_path, f"{name}/trainer_state.json", TEXTS["trainer_state.json"])
    write(tmp_path, "a/result_0.txt", mlperf())
    write(tmp_path, "b/result_0.txt", mlperf("bert", status="aborted"))
    logs = ["ddp/trainer_state.json", "zero3/trainer_state.json", "a/result_0.txt", "b/result_0.txt"]
    assert run_command(*logs, "--output", "new/runs") == 0
    names = ["a-result_0", "b-result_0", "ddp", "zero3"]
    assert sorted(path.name for path in Path("new/runs").iterdir()) == [f"{name}.run.json" for name in names]
    assert [run.name for run in archive.read(archive.find([Path("new")]))] == names
    printed = capsys.readouterr().out.splitlines()
    assert printed[:4] == [
        "ddp: trainer, 2 logged steps, 1 evaluation; finished",
        "zero3: trainer, 2 logged steps, 1 evaluation; finished",
        "a-result_0: mllog, 3 logged steps, 2 evaluations; A <b>company</b>, MLPerf Training, llama2_70b_lora, closed "
        "division, 8 x H100; finished",
        "b-result_0: mllog, 3 logged steps, 2 evaluations; A <b>company</b>, MLPerf Training, bert, closed division, "
        "8 x H100; missed its target",
    ]
    assert printed[4:5] == ["Wrote 4 runs to new/runs."]
    assert printed[-1].endswith(": zero-study compare new/runs")
    assert cli.run(printed[-1].partition("zero-study ")[2].split()) == 0
    assert "llama2_70b_lora" in capsys.readouterr().out
    assert run_command(*logs[:2], "--output", "new/runs") == 0
    assert "2 runs were there already." in capsys.readouterr().out


def test_the_command_states_what_the_log_does_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "trainer_state.json", TEXTS["trainer_state.json"])
    setting = ["--set", "gpu=h100", "--set", "num_gpus=8", "--set", "strategy=zero3", "--set", "compiled=false"]
    assert run_command(path, "--output", "runs", "--name", "mine", *setting) == 0
    run = folder.read(Path("runs/mine.run.json"))
    assert (run.setting.gpu, run.setting.num_gpus, run.setting.compiled) == ("h100", 8, False)
    assert run.marks == ["stated by the user, not by the log: compiled, gpu, num_gpus, strategy"]
    assert "2 logged steps, 1 evaluation; h100, zero3, 8 GPUs; finished" in capsys.readouterr().out
    assert run_command(path, "--output", "runs", "--name", "same", "--set", "planned_steps=20") == 0
    assert folder.read(Path("runs/same.run.json")).marks == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "planned_steps=30"], "the log states that planned_steps is 20, and --set states 30"),
        (["--set", "num_gpus=0"], "num_gpus=0"),
        (["--set", "num_gpus=many"], "num_gpus='many'"),
        (["--set", "learning_rate=nan"], "learning_rate"),
        (["--set", "cards=8"], "the field 'cards' is unknown"),
        (["--set", "versions=8"], "the field 'versions' is unknown"),
        (["--set", "num_gpus"], "write FIELD=VALUE"),
        (["--set", "gpu=a100", "--set", "gpu=h100"], "stated twice"),
        (["--name", "../mine"], "cannot be a file name"),
        (["--name", "mine", "other.txt"], "there are 2 logs"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "trainer_state.json", TEXTS["trainer_state.json"])
    write(tmp_path, "other.txt", modded())
    assert message in refusal(run_command, "trainer_state.json", "--output", "runs", *words)
    assert not Path("runs").exists()


def test_one_refused_log_means_that_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "good.txt", modded())
    write(tmp_path, "bad.txt", "No log.\n")
    assert "bad.txt: " in refusal(run_command, "good.txt", "bad.txt", "--output", "runs")
    assert not Path("runs").exists()


def test_another_run_of_the_same_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "log.txt", modded())
    run_command("log.txt", "--output", "runs")
    before = Path("runs/log.run.json").read_bytes()
    path.write_text(modded().replace("3.2784", "3.2785"))
    write(tmp_path, "new.txt", modded())
    assert "contains a different run" in refusal(run_command, "new.txt", "log.txt", "--output", "runs")
    assert Path("runs/log.run.json").read_bytes() == before
    assert not Path("runs/new.run.json").exists()
    Path("runs/log.run.json").write_text("{}")
    assert "runs/log.run.json" in refusal(run_command, "log.txt", "--output", "runs")


def test_what_could_not_be_read_is_in_the_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "log.txt", mlperf() + ":::MLLOG {damaged\n")
    assert run_command("log.txt", "--output", "runs") == 0
    printed = capsys.readouterr().out
    assert "  a damaged line of MLLOG was left out (line 19)\n" in printed
    assert "Wrote 1 run to runs. Parts of 1 run are missing or could not be read.\n" in printed


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1,4\n2,4\n3,4\n7,4\n8,4\n", "steps are missing in the middle: some logged steps are further apart than most"),
        ("10,4\n20,4\n30,4\n50,4\n60,4\n65,4\n", "steps are missing in the middle"),
        ("-1,4\n0,4\n1,4\n", "the number of a step is negative (line 2)"),
        ("1,a\n2,b\n", "columns without numbers were left out: x"),
        ("1,4\n10,4\n20,4\n30,4\n35,4\n", None),
        ("1,4\n2,4\n3,4\n4,4\n5,4\n10,4\n15,4\n", None),  # less often from here on
        ("1,4\n4,4\n9,4\n13,4\n30,4\n31,4\n", None),  # not regular
        ("10,4\n20,4\n30,4\n20,4\n30,4\n40,4\n", None),  # resumed
    ],
)
def test_what_is_missing_in_a_log_is_in_the_verdict(rows, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"{row},3.5" for row in rows.splitlines()]
    write(tmp_path, "any.csv", "\n".join(["step,x,loss", *lines, ""]))
    assert run_command("any.csv", "--output", "runs", "--json") == 0
    reasons = [each["what"] for each in json.loads(capsys.readouterr().out)["could_not_check"]]
    assert [message in reason for reason in reasons] == ([True] if message else [])


def test_what_json_lines_have_beside_numbers_is_in_the_verdict(run_of):
    row = {"step": 1, "loss": 2.5, "flag": True, "lists": [1], "a": {"b": {"c": {"d": 1}}}, "none": None, "empty": []}
    run = run_of(json_lines([row, row | {"step": 2}]), "any.jsonl")
    assert run.marks == ["columns without numbers were left out: a/b/c, flag, lists"]
    entries = [{"step": step, "loss": 1} if step % 3 else {"step": step, "eval_loss": 1} for step in range(1, 30)]
    history = [{"_step": row.pop("step"), "_runtime": 1, **row} for row in entries]
    assert not any("missing" in mark for mark in run_of(json_lines(history), "history.jsonl").marks)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/trainer_state.json"], ["x"]),
        (
            ["x/checkpoint-5/trainer_state.json", "y/checkpoint-5/trainer_state.json"],
            ["x-checkpoint-5", "y-checkpoint-5"],
        ),
        (["logs/version_0/metrics.csv", "logs/version_1/metrics.csv"], ["version_0", "version_1"]),
        (["a/log.txt", "b/log.log", "b/other.txt"], ["a-log", "b-log", "other"]),
        (["strange name (1).v2.txt", "record.json"], ["strange-name-1-.v2", "run-record"]),
        (["\u00e9\u00e9.txt"], ["run"]),
    ],
)
def test_names_of_runs(paths, names):
    assert imported._names([Path("/folder") / path for path in paths]) == names


def test_a_file_of_a_run_is_checked(tmp_path, run_of):
    path = written(run_of(modded()), tmp_path)
    content = json.loads(path.read_text())
    assert folder.read(path).name == "log"
    assert "Rename the file" in refusal(folder.read, path.rename(path.with_name("other.run.json")))
    for change in (
        {"name": None},
        {"training": {"columns": {"step": [1, 2], "loss": [3.5]}}},
        {"training": {"columns": {}}},
        {"training": {"columns": {"step": [1, 2]}, "not_finite": {"step": [0]}}},
        {"training": {"columns": {"step": [None]}, "not_finite": {"step": [1]}}},
        {"unknown": 1},
    ):
        path.write_text(json.dumps(content | change))
        refusal(folder.read, path)


def test_every_known_column_is_described():
    assert set(draft._ORDER) == set(COLUMNS)


# ---------------------------------------------------------------- several runs, and tables in other orders


INTERLEAVED = "run_id,step,loss\na,1,3.5\nb,1,4.5\na,2,3.25\nb,2,4.25\n"


@pytest.mark.parametrize("column", ["run_id", "run", "Run Name", "experiment", "seed"])
def test_a_column_that_names_the_run_divides_a_table(column, runs_of):
    a, b = runs_of(INTERLEAVED.replace("run_id", column), "sweep.csv")
    assert (a.name, b.name) == ("sweep-a", "sweep-b")
    assert columns(a) == {"step": [1, 2], "loss": [3.5, 3.25]}
    assert columns(b) == {"step": [1, 2], "loss": [4.5, 4.25]}
    assert (a.setting.other, a.marks) == ({column: "a"}, [])
    assert (a.source.lines, b.source.lines) == ([2, 4], [3, 5])


def test_json_lines_of_several_runs_and_one_value_for_all_rows(runs_of, run_of):
    rows = [{"run": run, "step": step, "loss": step / 8} for step in (1, 2, 3) for run in (7, 8)]
    assert [run.name for run in runs_of(json_lines(rows), "all.jsonl")] == ["all-7", "all-8"]
    one = run_of("run,step,loss\na,1,3.5\na,2,3.25\n,3,3\n", "one.csv")
    assert (one.name, columns(one)["step"], one.setting.other) == ("one", [1, 2, 3], {"run": "a"})
    twice = runs_of("run,step,loss\n" + "a,1,3\na,2,3\n" * 2 + "b,1,3\nb,2,3\n", "log.csv")
    assert [run.name for run in twice] == ["log-a-1", "log-a-2", "log-b"]


def test_a_column_with_too_many_runs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(draft, "MOST_RUNS", 3)
    path = write(tmp_path, "many.csv", "run,step,loss\n" + "".join(f"{n},{n},3\n" for n in range(5)))
    assert "its column run has more than 3 values" in refusal(imported.read, [path])


def test_a_printed_log_of_two_trainings_without_a_summary(runs_of):
    lines = PRINTED.split("\n")[:3]
    first, second = runs_of("\n".join([*lines, *lines, ""]))
    assert columns(first)["loss"] == columns(second)["loss"] == [2.1, 1.9]
    assert columns(first)["epoch"] == [0.4, 0.8]
    (resumed,) = runs_of("".join(f"{{'loss': 2.0, 'epoch': {epoch}}}\n" for epoch in (0.2, 0.4, 0.6, 0.4, 0.6)))
    assert resumed.marks == ["the epoch goes back: the training was resumed, or another training began (line 4)"]


@pytest.mark.parametrize("name", ["any.csv", "any.jsonl", "any.json"])
def test_a_table_whose_newest_row_is_first_is_one_run(name, run_of):
    rows = [{"step": 10 * n, "seconds": n / 2, "loss": 10.0 - n} for n in (5, 4, 3, 2, 1)]
    text = {"any.csv": as_csv(rows), "any.jsonl": json_lines(rows), "any.json": json.dumps(rows)}[name]
    run = run_of(text, name)
    assert columns(run)["step"] == [10, 20, 30, 40, 50]
    assert columns(run)["loss"] == [9, 8, 7, 6, 5]
    assert columns(run)["seconds"] == [0.5, 1, 1.5, 2, 2.5]
    assert run.marks == ["the newest row was first, so the rows were read in reverse order"]


def test_newest_rows_first_in_several_runs(runs_of, tmp_path, monkeypatch):
    header, *lines = INTERLEAVED.splitlines(keepends=True)
    a, b = runs_of(header + "".join(reversed(lines)), "sweep.csv")
    assert {run.name: columns(run)["step"] for run in (a, b)} == {"sweep-a": [1, 2], "sweep-b": [1, 2]}
    assert (a.source.lines, b.source.lines) == ([3, 5], [2, 4])
    monkeypatch.setattr("zero_study.logs.columns.MOST_REVERSED", 3)
    path = write(tmp_path, "long.csv", "step,loss\n4,1\n3,1\n2,1\n1,1\n")
    assert "Sort its rows by step" in refusal(imported.read, [path])


def test_steps_of_a_run_of_this_project_are_refused(tmp_path):
    line = '{"step": 1, "loss": 2.0, "learning_rate": 0.1, "grad_norm": 1.0, "seconds": 0.5, "tokens": 64'
    for name, more in (("steps.jsonl", ""), ("renamed.jsonl", ', "data_wait_seconds": 0.1')):
        path = write(tmp_path, f"run-1/{name}", line + more + "}\n")
        message = refusal(imported.read, [path])
        assert f"Use `zero-study compare {path.parent}`" in message
        assert "\n" not in message


def test_the_duration_of_a_step_is_no_clock(run_of):
    seconds = [3.5, 0.25, 0.5, 0.25, 0.25, 0.5]
    rows = [{"step": step, "elapsed_seconds": each, "loss": 2.0} for step, each in enumerate(seconds)]
    run = run_of(as_csv(rows), "any.csv")
    assert columns(run)["elapsed_seconds"] == seconds
    assert "seconds" not in columns(run)
    assert any("the column seconds fall while the steps rise" in mark for mark in run.marks)


def test_an_accuracy_in_percent_keeps_its_name(run_of):
    run = run_of("step,val_acc\n1,0.9\n2,55.2\n", "any.csv")
    assert columns(run, "evaluation") == {"step": [1, 2], "val_acc": [0.9, 55.2]}
    assert columns(run_of("step,val_acc\n1,0.5\n2,1\n", "any.csv"), "evaluation")["accuracy"] == [0.5, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step;loss\n1;3,5\n2;3,25\n", "line 2 has the number 3,5 with a decimal comma"),
        ('step,loss\n1,"3,5"\n', "line 2 has the number 3,5 with a decimal comma"),
        ("step,loss\n1,3,5\n2,3,25\n", "If its numbers have decimal commas"),
    ],
)
def test_decimal_commas_are_refused(text, message, tmp_path):
    assert message in refusal(imported.read, [write(tmp_path, "german.csv", text)])


def test_the_clock_of_wandb_does_not_begin_with_the_log(run_of):
    assert not any("seconds count from" in mark for mark in run_of(json_lines(WANDB_HISTORY), "history.jsonl").marks)


def test_an_output_that_is_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "log.txt", modded())
    for output in ("log.txt", "log.txt/runs"):
        assert f"--output {output}: log.txt is a file. Name a folder." in refusal(
            run_command, "log.txt", "--output", output
        )


def test_a_log_is_imported_before_it_is_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "good.csv", "step,loss\n1,3\n2,2\n")
    message = refusal(cli.run, ["compare", "good.csv"])
    assert "zero-study import good.csv --output FOLDER" in message
