"""The programs that make public runs from clones of repositories, on small repositories made here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import public_runs
import pytest
from public_sources import (
    ds_verify_loss,
    fms_acceleration,
    fsdp_qlora,
    lai_project,
    mlperf,
    modded_nanogpt,
    parameter_golf,
    ptd_benchmark,
    reading,
    readme,
)
from public_sources.checkout import Checkout

from study.public_runs import archive
from study.report import public_figures
from zero_study.errors import Refusal
from zero_study.public_runs.schema import PublicRun, Series, Setting, Source

AUTHOR = {f"GIT_{role}_{what}": "nobody" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
FREE = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def checkout(folder: Path, files: Mapping[str, str]) -> Checkout:
    """Return a checkout of a new repository with these files."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", folder, *words], check=True, env=FREE | AUTHOR)

    git("init", "-q")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git("add", ".")
    git("commit", "-q", "--no-verify", "--no-gpg-sign", "-m", "Add logs")
    return Checkout(folder, "owner/name", "HEAD", "none", "2026-11-28")


def test_a_checkout_reads_one_commit(tmp_path: Path) -> None:
    clone = checkout(tmp_path, {"a/b.txt": "text"})
    (tmp_path / "a" / "b.txt").write_text("later")
    assert clone.under("a/", suffix=".txt") == ["a/b.txt"]
    assert clone.read("a/b.txt") == b"text"
    with pytest.raises(Refusal, match="git show"):
        clone.read("absent")


def test_repeats_have_the_same_code_and_a_copied_log_is_no_repeat(tmp_path: Path) -> None:
    def log(code: str, n: int) -> str:
        rows = "".join(
            f"step:{step}/500 val_loss:{4 - step / 1000 + n / 1e4:.4f} train_time:{step}ms step_avg:1.00ms\n"
            for step in (0, 125, 250, 500)
        )
        return f"{code}\n{'=' * 100}\nRunning PyTorch 2.10.0+cu128\n{rows}"

    files = {f"records/one/{n:02}.txt": log("a", n) for n in range(10)}
    files |= {f"records/one/b{n}.txt": log("b", n) for n in range(9)} | {"records/one/copy.txt": log("b", 0)}
    runs = list(modded_nanogpt.repeats(checkout(tmp_path, files)))
    assert [run.source.path for run in runs] == [f"records/one/{n:02}.txt" for n in range(10)]
    assert len({run.setting.entry for run in runs}) == 1
    assert runs[1].evaluation is not None
    assert runs[1].evaluation.columns["step"] == [250, 500]
    assert runs[1].evaluation.columns["evaluation_loss"] == [3.7501, 3.5001]


def test_settings_that_have_ddp_and_fsdp_are_kept(tmp_path: Path) -> None:
    start, tail = "GPTXL_ws8_bs16_vs50000_blk256_noop_fp16_np2", "delays = 0.50 (0.01)\nmax mem = 1500.0MB\n"
    files = {
        f"delay/ddp_{start}.txt": tail,
        f"delay/fsdp_{start}_transformer.txt": tail,
        f"delay/fsdp_{start}.txt": tail,
        "delay/ddp_GPTXL_ws8_bs32_vs50000_blk256_noop_fp16.txt": tail,
    }
    runs = list(ptd_benchmark.runs(checkout(tmp_path, files)))
    assert [run.name for run in runs] == [f"ddp-{start}", f"fsdp-{start}"]
    assert runs[1].totals == {"seconds_per_step": 0.5, "peak_allocated_bytes": 1_500_000_000}
    assert (runs[1].setting.num_nodes, runs[1].setting.micro_batch_size, runs[1].setting.offload) == (4, 16, None)
    assert runs[1].source.license == "none"


def step(second: float, number: int, loss: float, rate: float) -> str:
    moment = f"2025-05-23 10:00:{second:06.3f}".replace(".", ",")
    return f"{moment} - root - INFO - Step: {number} | Loss: {loss} | Tokens per second: {rate} | x\n"


ARGUMENTS = "Namespace(sequence_length=100, batch_size=1, learning_rate=5e-05, lr_warmup_steps=10, training_steps=5)\n"
STARTS = "2025-05-23 10:00:{:02},000 - root - INFO - Starting training!\n"


def test_trainings_that_log_at_the_same_time_are_separated(tmp_path: Path) -> None:
    # The first begins at 0 s and takes 1 s per step. The second begins at 1 s and takes 0.5 s, so it overtakes.
    lines = [
        STARTS.format(0), STARTS.format(1), step(1.0, 1, 9.0, 100), step(1.5, 1, 8.0, 200), step(3.5, 5, 6.0, 200),
        step(5.0, 5, 7.0, 100),
    ]  # fmt: skip
    files = {"logs/one/a.out": ARGUMENTS + "".join(lines), "logs/one/b.out": "nothing\n"}
    clone = checkout(tmp_path, files)
    first, second = lai_project.runs(clone)
    assert first.training is not None
    assert second.training is not None
    assert first.training.columns["loss"] == [9.0, 7.0]
    assert second.training.columns["loss"] == [8.0, 6.0]
    assert second.training.columns["seconds"] == [0.5, 2.5]
    assert second.training.columns["seconds_per_step"] == [0.5, 0.5]
    assert (first.ending, first.setting.num_gpus, first.setting.seed) == ("finished", 1, None)
    assert clone.left_out == ["logs/one/b.out: no step of a training"]


def test_ranks_of_one_training_are_one_run(tmp_path: Path) -> None:
    lines = [STARTS.format(0), step(1.0, 1, 9.0, 100), step(1.001, 1, 9.0, 100)]
    (run,) = lai_project.runs(
        checkout(tmp_path, {"logs/a.out": ARGUMENTS + "[rank 0] world size: 8\n" + "".join(lines)})
    )
    assert run.setting.num_gpus == 8
    assert run.setting.offload == "parameters"
    assert run.ending == "ended early"
    assert run.marks == ["2 ranks log their steps, of which one is kept"]


PAGE = """\
## Case Study: A Dual 3090
the peak allocated memory is 8.00 GiB vs 9.00 GiB, respectively

| Train Type | Batch Size | Peak Memory (GiB) | Time (s) |
| :--: | :--: | :--: | :--: |
| LoRA | 4 | 16.00 | 1,366 |

*Llama-2 7B with Context Length of 2048*

## Case Study: A Dual 4090 x

| Train Type | Batch Size | Peak Memory (GiB) | Time (s) |
| :--: | :--: | :--: | :--: |
| LoRA | 5 | 16.00 | 1 |

*Llama-2 7B with Context Length of 2048*

## Recommendations for

| Accelerator | GPUs | CPU+Activation Offload | Batch Size | Time (s) | Ballpark Cost |
| :--: | :--: | :--: | :--: | :--: | --- |
| A5000 24GB | 2 | True | 2 | 9,688 | $ |
| H100 80GB SXM | 4 | False | 8 | 667 | $ |

*Llama-2 70B QLoRA with Context Length of 2048 on Select Accelerators*
"""


def test_rows_of_other_cards_are_not_read(tmp_path: Path) -> None:
    runs = list(fsdp_qlora.runs(checkout(tmp_path, {fsdp_qlora.FILE: PAGE})))
    assert [(run.name, run.source.lines, run.totals["seconds"]) for run in runs] == [
        ("fq-3090-7b-lora-b4", [6, 6], 1366.0),
        ("fq-h100-70b-x4", [23, 23], 667.0),
    ]


COLUMNS = (
    "bf16,framework_config,learning_rate,mem_nvidia_mem_reserved,mem_peak_torch_mem_alloc_in_bytes,"
    "mem_torch_mem_alloc_in_bytes,model_name_or_path,num_gpus,peft_method,per_device_train_batch_size,target_modules,"
    "torch_dtype,train_loss,train_runtime,train_steps_per_second,train_tokens_per_second\n"
)
ROWS = (
    ",none,2e-5,100.0,300.0,200.0,a/M,1,,4,,bfloat16,1.5,50.0,2.0,400.0\n"
    ",none,2e-5,90.0,,,a/M,2,,2,,bfloat16,,,,\n"
    "True,accelerated-peft-bnb-foak,2e-4,60.0,30.0,20.0,a/M,2,lora,2,q_proj,bfloat16,1.25,25.0,4.0,400.0\n"
)


def test_rows_of_one_and_of_several_gpus_have_one_entry(tmp_path: Path) -> None:
    folder, first = fms_acceleration.FOLDER, next(iter(fms_acceleration.FILES))
    files = {f"{folder}{name}": COLUMNS for name in fms_acceleration.FILES}
    files |= {
        f"{folder}{releases}.txt": "torch==2.4.1\nattrs==1\n" for _, releases, *_ in fms_acceleration.FILES.values()
    }
    one, two, adapters = fms_acceleration.runs(checkout(tmp_path, files | {f"{folder}{first}": COLUMNS + ROWS}))
    assert one.setting.entry == two.setting.entry == "packed/none/M/full/no/4"
    assert (one.setting.engine, two.setting.engine, one.setting.versions) == ("none", "FSDP1", {"torch": "2.4.1"})
    assert (one.totals["loss"], one.totals["seconds_per_step"], one.totals["used_bytes"]) == (1.5, 0.5, 100 << 20)
    assert (two.totals, two.ending, two.source.lines) == ({}, "ended early", [3, 3])
    assert adapters.setting.adapter == "LoRA, rank 16, on q_proj; frozen: NF4"
    assert (adapters.setting.other["mixed_precision"], adapters.setting.other["quantized_kernels"]) == ("bf16", True)


GOLF = """\
log0(f"step:{step}/{args.iterations} val_loss:{val_loss:.4f} train_time:{training_time_ms:.0f}ms")
====================================================================================================
Running PyTorch 2.10.0+cu128
model_params:17059912
world_size:2 grad_accum_steps:4
train_batch_tokens:8192 train_seq_len:1024 iterations:20000 warmup_steps:20 max_wallclock_seconds:600.000
seed:1337
step:0/20000 val_loss:6.5 val_bpb:4.1 train_time:0ms step_avg:0.01ms
step:1/20000 train_loss:6.25 train_time:500ms step_avg:500.00ms
step:2/20000 val_loss:6.0 val_bpb:4.0 train_time:1000ms step_avg:500.00ms
peak memory allocated: 100 MiB reserved: 200 MiB
final_int8_zlib_roundtrip val_loss:5.0 val_bpb:3.1 eval_time:10ms
"""


def test_steps_are_read_after_the_program_that_a_log_begins_with(tmp_path: Path) -> None:
    (run,) = parameter_golf.runs(checkout(tmp_path, {f"{parameter_golf.FOLDER}train_v0.txt": GOLF}))
    assert run.training is not None
    assert run.evaluation is not None
    assert run.training.columns == {"step": [1], "samples": [8], "seconds": [0.5], "loss": [6.25]}
    assert run.evaluation.columns["evaluation_loss"] == [6.5, 6.0]
    assert (run.setting.num_gpus, run.setting.accumulation_steps, run.setting.micro_batch_size) == (2, 4, 1)
    assert run.totals == {"peak_allocated_bytes": 100 << 20, "peak_reserved_bytes": 200 << 20}


VERIFY = """\
Namespace(model_name='m', learning_rate=1e-06, zero_stage=2)
DeepSpeed info: version=0.17.1+e440506b, git-hash=e440506b
Epoch 1, Step 40, Loss: 10.5 sync: True time: 0.5 alloc_mem: 100 peak_mem: 300
Epoch 1, Step 80, Loss: 9.5 sync: True time: 0.25 alloc_mem: 100 peak_mem: 300
m ds=True np=8 batch_size=1 seq=512 zero_stage=2 acc=4 ac=False compile=False iteration time: 0.3000 alloc_mem: 1 peak
"""


def test_micro_steps_are_counted_as_optimizer_steps(tmp_path: Path) -> None:
    (run,) = ds_verify_loss.runs(checkout(tmp_path, {f"{ds_verify_loss.FOLDER}z2_baseline.log": VERIFY}))
    assert run.training is not None
    assert (run.training.columns["step"], run.training.columns["loss"]) == ([10, 20], [10.5, 9.5])
    assert (run.setting.strategy, run.setting.global_batch_size, run.setting.gpu) == ("zero2", 32, None)
    assert run.totals == {"seconds_per_step": 0.3}


def test_systems_of_dell_with_h100_are_read_and_their_repetitions_are_not(tmp_path: Path) -> None:
    line = ':::MLLOG {{"time_ms": {}, "event_type": "POINT_IN_TIME", "key": "{}", "value": {}, "metadata": {}}}\n'
    log = "".join(
        line.format(*parts)
        for parts in [
            (0, "submission_benchmark", '"llama2_70b_lora"', "{}"),
            (0, "global_batch_size", 8, "{}"),
            (0, "run_start", "null", "{}"),
            (1000, "train_loss", 1.5, '{"samples_count": 80}'),
            (2000, "eval_accuracy", 0.94, '{"samples_count": 80}'),
        ]
    )
    system = '{"accelerator_model_name": "NVIDIA H100-SXM5-80GB", "number_of_nodes": "2", "accelerators_per_node": "8"}'
    files = {
        f"Dell/{place}": text
        for name in ("2xXE9680x8H100-SXM-80GB", "2xXE9680x8H100-SXM-80GB-POWER")
        for place, text in (
            (f"results/{name}/llama2_70b_lora/result_0.txt", log),
            (f"systems/{name}.json", system),
        )
    }
    (run,) = mlperf.llama2_lora_dell(checkout(tmp_path, files))
    assert run.evaluation is not None
    assert run.evaluation.columns["evaluation_loss"] == [0.94]
    assert (run.name, run.setting.num_gpus, run.setting.engine) == (
        "dell-2xXE9680x8H100-SXM-80GB-0", 16, "Megatron Core",
    )  # fmt: skip


def test_few_steps_are_multiples_of_a_round_number() -> None:
    run = PublicRun(
        made_by="a test",
        name="a",
        log_format="csv",
        source=Source(path="a", sha256="0" * 64),
        training=Series(columns={"step": list(range(1, 102)), "loss": [1.0] * 101}),
        setting=Setting(),
    )
    kept = reading.with_few_steps(run, 6).training
    assert kept is not None
    assert kept.columns["step"] == [1, 20, 40, 60, 80, 100, 101]
    assert reading.with_few_steps(run, 101) is run


def test_the_committed_page_is_that_of_the_archive() -> None:
    committed = (archive.ARCHIVE / "README.md").read_text(encoding="utf-8")
    assert committed == readme.page(public_runs.SOURCES)
    assert archive.sources() == sorted(public_runs.SOURCES)


def test_the_table_by_strategy_shows_what_is_stated() -> None:
    run = PublicRun(
        made_by="a test",
        name="a",
        log_format="text",
        source=Source(path="a", sha256="0" * 64),
        setting=Setting(model="m", gpu="A100", num_gpus=8, strategy="zero3", other={"note": None}),
        totals={"seconds_per_step": 7.71, "peak_reserved_gb": 55.4},
    )
    (row,) = public_figures.by_strategy([run]).to_dict("records")
    assert (row["s/step"], row["samples/s"], row["peak per GPU"], row["note"]) == ("7.71", "", "55.4 GB", "")
