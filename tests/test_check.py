"""Does `zero-study check` say what is wrong with a table, and keep silent where nothing is?

tests/tables/ has published tables as they are printed, each row with its source.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from study import cli
from study.errors import Refusal
from study.planner import check
from study.planner.check import table
from study.theory import measured_by_others, shapes

TABLES = Path(__file__).parent / "tables"
MPT = {"a100_40gb": "a100-40gb", "a100_80gb": "a100-80gb", "h100_80gb": "h100-sxm"}


def write(path: Path, rows: list[dict]) -> Path:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def found(path: Path) -> list[tuple[tuple[int, ...], str, str]]:
    return [(one.rows, one.certainty, one.text) for one in check.check(path).suspicions]


@pytest.fixture
def said(tmp_path):
    """What is said of rows: how sure, and in which words."""

    def make(*rows: dict) -> list[tuple[str, str]]:
        return [(certainty, text) for _, certainty, text in found(write(tmp_path / "table.csv", list(rows)))]

    return make


# ---------------------------------------------------------------- published tables

# What is said of each, by the beginning of its words; every other row is passed over in silence.
TOO_LITTLE = "is too little: the planner's least peak"
EXPECTED = {
    "llm_c_scripts": [((6,), "certain", "423 TFLOP/s a GPU of model FLOPs (256 x 2,048 tokens / 0.15 s / 8 GPUs")],
    "deepspeed_muon": [((2, 3), "likely", "3.10 GiB less (34.5 GiB and 31.4 GiB) is more than states can give")],
    "baisya_ddp_fsdp": [
        ((2, 4, 6, 8, 10, 14, 17, 20, 23), "likely", "row 2: 85.9 TFLOP/s a GPU of model FLOPs (16,521 tok/s x 5.2"),
        ((5,), "likely", f"15,619 MB {TOO_LITTLE}"),
        ((7,), "likely", f"16,104 MB {TOO_LITTLE}"),
        ((9,), "likely", f"30,224 MB {TOO_LITTLE}"),
        ((11,), "likely", f"58,438 MB {TOO_LITTLE}"),
        ((13, 14), "certain", "32 x 1,024 tokens / 5.615 s a step = 5,836 tokens/s is not 32,582 tok/s"),
        ((15,), "likely", "~12 GB is the states' formula, 16 bytes x 0.7744e9 parameters"),
        ((16, 17), "certain", "32 x 1,024 tokens / 2.915 s a step = 11,241 tokens/s is not 62,870 tok/s"),
        ((18,), "likely", "~12 GB is the states' formula, 16 bytes x 0.7744e9 parameters"),
        ((19, 20), "certain", "32 x 1,024 tokens / 2.94 s a step = 11,146 tokens/s is not 62,244 tok/s"),
        ((21,), "likely", "~4 GB is too little for a peak: states of AdamW all in fp32, split over 2 GPUs"),
        ((22, 23), "certain", "32 x 1,024 tokens / 2.93 s a step = 11,184 tokens/s is not 62,495 tok/s"),
        ((24,), "likely", "~8 GB is the states' formula, 10 bytes x 0.7744e9 parameters"),
    ],
    "llama_2_70b": [
        ((3,), "certain", "states of AdamW with fp32 masters, split over 8 GPUs take 1.5 bytes x 68.98e9 parameters"),
        ((5,), "likely", "states of AdamW with fp32 masters, split over 8 GPUs take 1.5 bytes x 68.98e9 parameters"),
    ],
    "fms_liger": [((2, 5, 8, 11, 14, 17, 20, 23, 26), "likely", "two precision classes in one column: rows 2, 5, 8")],
    "nvidia_bert_a100": [
        ((10,), "certain", "micro batch 126 x accumulation 64 x 8 GPUs = 64,512 sequences, not 65,536"),
        ((12,), "certain", "micro batch 126 x accumulation 16 x 32 GPUs = 64,512 sequences, not 65,536"),
        ((13,), "certain", "micro batch 256 x accumulation 18 x 32 GPUs = 147,456 sequences, not 65,536"),
        ((14,), "certain", "micro batch 126 x accumulation 2 x 256 GPUs = 64,512 sequences, not 65,536"),
    ],
    "internevo_7b": [],
    "torchtitan_h100": [],
    "transformers_v100": [],
}


def test_every_table_is_expected():
    assert {path.stem for path in TABLES.glob("*.csv")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_table(name):
    told = found(TABLES / f"{name}.csv")
    assert [(rows, certainty) for rows, certainty, _ in told] == [one[:2] for one in EXPECTED[name]]
    for (_, _, text), (_, _, start) in zip(told, EXPECTED[name], strict=True):
        assert text.startswith(start)


def foundry() -> list[dict]:
    """The rows of LLM Foundry's tables, three of them for each: tokens per second, MFU and FLOP/s."""
    with open(measured_by_others.THROUGHPUT, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    rows = []
    for line in lines:
        run = {
            "model": f"mpt-{line['model']}",
            "params": line["num_params"],
            "gpu": MPT[line["gpu"]],
            "num_gpus": line["num_gpus"],
            "strategy": line["sharding_strategy"],
            "precision": line["precision"],
            "seq_len": line["sequence_length"],
            "micro_batch": line["micro_batch_size"],
            "gradient_accumulation_steps": line["gradient_accumulation_steps"],
            "global_batch": line["global_batch_size"],
            "act_ckpt": line["activation_checkpointing"],
        }
        for metric, value, unit in (
            ("tokens_per_second_per_gpu", line["tokens_per_second_per_gpu"], "tok/s/GPU"),
            ("mfu", line["mfu_percent"], "%"),
            ("tflops_per_gpu", line["model_tflops"], "TFLOP/s/GPU"),
        ):
            rows.append({**run, "metric": metric, "value": value, "unit": unit})
    return rows


def test_108_measured_rows_are_not_suspected(tmp_path):
    path = write(tmp_path / "foundry.csv", foundry())
    checked = check.check(path)
    assert checked.suspicions == []
    assert len(checked.outcomes["FLOP/s against the card"].looked_at) == checked.num_rows == 324
    assert len(checked.outcomes["speed against the planner"].looked_at) > 100


@pytest.mark.parametrize("factor", [3, 10])
def test_the_same_rows_faster_are_nearly_all_suspected(tmp_path, factor):
    """Three times as fast as LLM Foundry's are beyond most peaks; ten times beyond every one."""
    rows = [row for row in foundry() if row["unit"] == "tok/s/GPU"]
    for row in rows:
        row["value"] = str(factor * float(row["value"]))
    told = found(write(tmp_path / "foundry.csv", rows))
    sure = {row for numbers, certainty, _ in told if certainty != "unexpected" for row in numbers}
    assert len(sure) >= {3: 25, 10: len(rows)}[factor]
    if factor == 3:
        assert len({row for numbers, _, _ in told for row in numbers}) >= 0.9 * len(rows)


# ---------------------------------------------------------------- each check fires, and keeps silent

LLAMA = {"model": "llama-2-7b", "gpu": "a100-80gb", "num_gpus": 8, "strategy": "zero3", "precision": "bf16 mixed"}
TIMED = {**LLAMA, "seq_len": 4096, "micro_batch": 2, "global_batch": 16, "act_ckpt": "none"}
TOKENS = {**TIMED, "metric": "tokens_per_second_per_gpu", "unit": "tok/s/GPU"}
PEAK = {**TIMED, "metric": "peak_memory_allocated", "unit": "GiB"}
RESTING = {**LLAMA, "metric": "memory_allocated_after_step", "unit": "bytes"}
CHECKPOINTED = {"act_ckpt": "full"}
FP32 = {**TOKENS, "model": "gpt2", "num_gpus": 1, "strategy": "single", "precision": "fp32", "seq_len": 1024,
        "global_batch": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "certainty", "words"),
    [
        ({**TOKENS, "value": 9000}, "certain", "9000 tok/s/GPU x 46.1 GFLOP a token), 357 of them without attention"),
        ({**TOKENS, "value": 7800}, "likely", "is above the 312 of a100-80gb in bf16"),
        ({**TOKENS, "value": 6500, **CHECKPOINTED}, "likely", "with checkpointing's second forward pass, is above"),
        ({**TOKENS, "value": 9000, "gpu": "A100"}, "certain", "is above the 312 of a100"),
        ({**TOKENS, "value": "72,000", "metric": "tokens_per_second", "unit": "tok/s"}, "certain", "/ 8 GPUs"),
        ({**TIMED, "metric": "samples_per_second", "value": 20, "unit": "seq/s"}, "likely", "as long as that"),
        ({**TIMED, "metric": "step_time", "value": 500, "unit": "ms", "global_batch": 128},
         "certain", "128 x 4,096 tokens / 0.5 s / 8 GPUs"),
        ({"model": "mine", "params": "7B", "gpu": "h100", "metric": "tokens_per_second_per_gpu", "value": 40000,
          "unit": "tok/s/GPU", "precision": "bf16"}, "likely", "6 x 7e9 parameters) is above the 989"),
        ({"model": "mine h4096 L32", "params": "7B", "gpu": "h100", "metric": "tokens_per_second_per_gpu",
          "value": 20000, "unit": "tok/s/GPU", "precision": "bf16", "seq_len": 65536}, "likely", "12 x 32 x 4,096"),
        ({"model": "mine", "params": "7B", "layers": 32, "hidden": 4096, "gpu": "h100", "value": 20000,
          "metric": "tokens_per_second_per_gpu", "unit": "tok/s/GPU", "precision": "bf16", "seq_len": 65536},
         "likely", "12 x 32 x 4,096 x 65,536 of attention"),
        ({**LLAMA, "metric": "tflops_per_gpu", "value": 400, "unit": "TFLOP/s/GPU"}, "likely", "above the 312"),
        ({**LLAMA, "metric": "tflops", "value": 8000, "unit": "TFLOP/s"}, "certain", "/ 8 GPUs is above the 312"),
        ({**LLAMA, "metric": "mfu", "value": "104", "unit": "%"}, "likely", "104 % is more than a whole peak"),
        ({**FP32, "value": 150_000}, "likely", "above the 19.5 of a100-80gb in fp32, unless fp32 stands for TF32"),
        ({**FP32, "value": 900_000}, "certain", "above the 156 of a100-80gb in tf32"),
        ({**TOKENS, "precision": "fp8", "value": 3000}, "likely", "a100-80gb: no unit for fp8, which could only be"),
        ({**TOKENS, "gpu": "t4", "value": 10, "act_ckpt": "full"}, "likely", "t4: no unit for bf16"),
    ],
)  # fmt: skip
def test_more_flops_than_the_card_has(said, row, certainty, words):
    ((told, text),) = [one for one in said(row) if one[0] != "unexpected"]
    assert told == certainty
    assert words in text


@pytest.mark.parametrize(
    "change",
    [
        {"value": 3500},
        {**FP32, "value": 15_000},
        {**FP32, "value": 150_000, "precision": "tf32"},
        {"value": 9000, "gpu": "h100"},
        {"value": 9000, "gpu": "rtx-4090"},  # not known
        {"value": 9000, "notes": "LoRA"},
        {"value": 12000, "model": "mine-8x7b", "params": "26.7B"},  # of which a token meets some
        {"value": 9000, "metric": "generated_tokens_per_second_per_gpu"},
        {"value": 9000, "model": "t5-large", "params": "0.77B"},
        {"value": ""},
    ],
)
def test_flops_that_the_card_may_have(said, change):
    assert [one for one in said({**TOKENS, **change}, {**TOKENS, "value": 3000}) if one[0] != "unexpected"] == []


@pytest.mark.parametrize(
    ("row", "certainty", "words"),
    [
        ({**LLAMA, "num_gpus": 1, "optimizer": "AdamW"}, "certain", "12 bytes x 6.738e9 parameters = 75.3 GiB"),
        ({**LLAMA, "num_gpus": 1}, "likely", "AdamW (assumed) with fp32 masters"),
        ({**LLAMA, "model": "mine", "params": "70B", "strategy": "", "optimizer": "adamw"}, "certain", "over 8 GPUs"),
        ({**LLAMA, "model": "mine", "params": "46B", "optimizer": "adamw"}, "likely", "and gradients take 2 bytes"),
        ({**LLAMA, "model": "mine", "params": "70B", "precision": "bf16"}, "likely", "only all in 16 bits"),
        ({**TIMED, "micro_batch": 32, "global_batch": 256}, "likely", "by more than a doubt of 10 %"),
    ],
)
def test_runs_that_do_not_fit(said, row, certainty, words):
    row = {"gpu": "a100-40gb", **row, **({"gpu": "a100-40gb"} if row["num_gpus"] == 1 else {})}
    ((told, text),) = said(row)
    assert told == certainty
    assert words in text


@pytest.mark.parametrize(
    "change",
    [
        {"num_gpus": 16},
        {"notes": "optimizer offloaded to the CPU"},
        {"strategy": "fsdp, QLoRA"},
        {"strategy": "zero1 + TP 8"},
        {"optimizer": "adafactor"},
        {"strategy": "colossal gemini"},  # not understood
        {"gpu": "mi300x"},
        {"params": "35B"},
        {"metric": "peak_memory", "value": "OOM", "unit": "GiB"},
    ],
)
def test_runs_that_may_fit(said, change):
    row = {**LLAMA, "model": "mine", "params": "70B", "optimizer": "adamw"}
    assert len(said(row)) == 1
    assert said({**row, **change}, {"model": "other", "metric": "mfu", "value": 40, "unit": "%"}) == []


def classes(*held: tuple[int, str, float], precision: str = "bfloat16", **more) -> list[dict]:
    """Rows of one column: GPUs, strategy and bytes per parameter held between steps."""
    model = {**RESTING, "model": "mistral-7b", "params": 7_241_732_096, "precision": precision, **more}
    return [{**model, "num_gpus": n, "strategy": how, "value": round(b * 7_241_732_096)} for n, how, b in held]


def test_two_precision_classes_in_one_column(said):
    ((certainty, text),) = said(*classes((1, "single", 6.002), (2, "fsdp-full", 8.002), (4, "fsdp-full", 4.003)))
    assert certainty == "likely"
    assert "row 2 without fp32 masters (6.002 bytes a parameter, 6 by formula)" in text
    assert "rows 3, 4 with fp32 masters (8.002 bytes a parameter, 16 / 2 by formula)" in text


def test_one_precision_class_in_a_column(said):
    assert said(*classes((1, "single", 6.002), (2, "fsdp-full", 4.002))) == []  # with gradients, and without
    assert said(*classes((1, "single", 12.1), (2, "fsdp-full", 8.002))) == []
    assert said(*classes((1, "single", 6.5), (2, "fsdp-full", 8.002))) == []  # neither of both
    assert said(*classes((1, "single", 6.002)), *classes((2, "fsdp-full", 8.002), precision="fp32 master")) == []
    assert said(*classes((1, "single, LoRA", 2.3), (2, "fsdp-full", 8.002))) == []


@pytest.mark.parametrize(
    ("row", "certainty", "words"),
    [
        ({**PEAK, "strategy": "zero2", "value": 12, "optimizer": "adamw"}, "certain", "alone take 3.5 bytes"),
        ({**PEAK, "strategy": "zero2", "value": 11}, "likely", "parameters alone take 2 bytes x 6.738e9 parameters"),
        ({**PEAK, "strategy": "ddp", "value": 90, "optimizer": "adamw"}, "likely", "too little for a peak"),
        (
            {**PEAK, "value": 30, "optimizer": "adamw"},
            "likely",
            "is too little: the planner's least peak, 53.2 GiB without logits",
        ),
        ({**RESTING, "strategy": "ddp", "value": 5 * 10**10, "optimizer": "adam"}, "certain", "12 bytes x 6.738e9"),
    ],
)
def test_memory_below_what_must_be_there(said, row, certainty, words):
    row["gpu"] = "mi300x"  # which is not known, so that nothing is said of the card
    ((told, text),) = said(row)
    assert told == certainty
    assert words in text


@pytest.mark.parametrize(
    "row",
    [
        {**PEAK, "value": 70},
        {**PEAK, "value": 20, "optimizer": "adamw", **CHECKPOINTED},
        # Whatever its optimizer is: in 8 bits, on the host, none at all.
        {**PEAK, "value": 14, "strategy": "single", "num_gpus": 1, "global_batch": 2, **CHECKPOINTED},
        {**PEAK, "value": 22, "act_ckpt": "selective"},
        {**PEAK, "value": 12, "strategy": "zero2", "optimizer": "adafactor"},
        {**PEAK, "value": 12, "strategy": "zero2", "optimizer": "AdamW 8-bit"},
        {**PEAK, "value": 12, "strategy": "zero2", "optimizer": "something new"},
        {**PEAK, "value": 12, "strategy": "zero2-cpu-offload"},
        {**PEAK, "value": 12, "strategy": "zero2 with LoRA"},
        {**PEAK, "value": 12, "metric": "peak_host_memory"},
        {**PEAK, "value": 3, "metric": "memory_saved"},
        {**RESTING, "strategy": "ddp", "value": 8.2e10, "optimizer": "adam"},
        # In GiB, which many call GB, there is room.
        {**RESTING, "strategy": "ddp", "value": 76, "unit": "GB", "optimizer": "adam"},
    ],
)
def test_memory_that_may_be(said, row):
    assert said({**row, "gpu": "mi300x"}, {"metric": "peak_memory", "value": 1, "unit": "GiB"}) == []


def savings(first: dict, second: dict) -> list[dict]:
    return [
        {**PEAK, "model": "mine", "params": "3.09B", "gpu": "", "strategy": "zero2", **row} for row in (first, second)
    ]


def test_a_saving_that_states_cannot_give(said):
    ((certainty, text),) = said(*savings({"value": 34.5, "optimizer": "adamw"}, {"value": 31.4, "optimizer": "muon"}))
    assert (certainty, "4 bytes x 3.09e9 parameters / 8 GPUs = 1.44 GiB" in text) == ("likely", True)
    told = said(*savings({"value": 130.0, "strategy": "ddp"}, {"value": 20.0, "strategy": "zero3"}))
    assert [certainty for certainty, _ in told] == ["likely"]
    assert "all states and buffers that could be split are 26 bytes x 3.09e9 parameters = 74.8 GiB" in told[0][1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"value": 34.5, "optimizer": "adamw"}, {"value": 33.1, "optimizer": "muon"}),
        ({"value": 34.5, "optimizer": "muon"}, {"value": 31.4, "optimizer": "adamw"}),  # needs more, for another reason
        ({"value": 94.5, "optimizer": "adamw", "num_gpus": 1}, {"value": 83.5, "optimizer": "muon", "num_gpus": 1}),
        ({"value": 34.5, "optimizer": "adamw"}, {"value": 31.4, "optimizer": "adamw"}),
        ({"value": 34.5, "optimizer": "adamw", "micro_batch": 4}, {"value": 21.4, "optimizer": "muon"}),
        ({"value": 34.5, "optimizer": "adamw"}, {"value": 21.4, "optimizer": "muon", "notes": "with offload"}),
        ({"value": 60.5, "strategy": "ddp"}, {"value": 11.0, "strategy": "zero3"}),
    ],
)  # fmt: skip
def test_a_saving_that_states_may_give(said, first, second):
    # The memory itself is not the question here.
    assert [text for _, text in said(*savings(first, second)) if "less (" in text] == []


STEP = {"metric": "seconds_per_step", "unit": "s"}
WHOLE = {"metric": "tokens_per_second", "unit": "tok/s"}


@pytest.mark.parametrize(
    ("rows", "certainty", "words"),
    [
        ([{**TOKENS, "value": 3000}, {**TIMED, **WHOLE, "value": 12000}], "certain", "3000 tok/s/GPU x 8 GPUs is not"),
        ([{**TOKENS, "value": 3000}, {**TIMED, **WHOLE, "value": 3000}], "certain", "(the number of GPUs"),
        ([{**TOKENS, "value": 3000}, {**TIMED, **WHOLE, "value": 29000}], "likely", "a factor of 1.21"),
        ([{**TOKENS, "value": 3000}, {**TIMED, **STEP, "value": 5.5}], "certain", "16 x 4,096 tokens / 5.5 s a step"),
        ([{**TIMED, "metric": "samples_per_second", "value": 2.9, "unit": "samples/s"}, {**TIMED, **STEP, "value": 11}],
         "certain", "16 sequences / 11 s a step = 1.455 sequences/s is not 2.9 samples/s"),
        ([{**TOKENS, "value": 3000}, {**TIMED, "metric": "mfu", "value": 60, "unit": "%"}], "likely", "no usual count"),
        ([{**row, "gpu": "h100"} for row in ({**TOKENS, "value": 3000}, {**TIMED, "metric": "mfu", "value": "41%"})],
         "likely", "41% of 989 is 405 TFLOP/s a GPU; 3000 tok/s/GPU x 46.1 GFLOP a token is 138, and no usual count"),
        ([{**TIMED, "gradient_accumulation_steps": 2}], "certain", "= 32 sequences, not 16"),
        ([{**TIMED, "global_batch": 24}], "likely", "1.5 times micro batch 2 x 8 GPUs"),
    ],
)  # fmt: skip
def test_numbers_of_one_run_that_do_not_agree(said, rows, certainty, words):
    ((told, text),) = said(*rows)
    assert told == certainty
    assert words in text


@pytest.mark.parametrize(
    "rows",
    [
        [{**TOKENS, "value": 3000}, {**TIMED, **WHOLE, "value": 24500}],
        [{**TOKENS, "value": 3000}, {**TIMED, **STEP, "value": 2.73}],
        [{**TOKENS, "value": 3000}, {**TIMED, "metric": "seconds_per_10_steps", "value": 27.3, "unit": "s"}],
        [{**TOKENS, "value": 3000}, {**TIMED, **STEP, "value": 5.5, "notes": "another run"}],
        [{**TOKENS, "value": 3000}, {**TOKENS, "value": 3100}, {**TIMED, **STEP, "value": 5.5}],  # which of them?
        [{**TOKENS, "value": 3000}, {**TIMED, "metric": "seconds_per_epoch", "value": 5.5, "unit": "s"}],
        [{**TOKENS, "value": 3000}, {**TIMED, "metric": "mfu", "value": 41, "unit": "%"}],
        [{**TOKENS, "value": 3000}, {**TIMED, "metric": "mfu", "value": 0.41, "unit": ""}],
        # Of H100 PCIe's peak.
        [{**TOKENS, "value": 5500, "gpu": "h100"}, {**TIMED, "metric": "mfu", "value": 33, "unit": "%", "gpu": "h100"}],
        [{**TIMED, "gradient_accumulation_steps": 1}],
        [{**TIMED, "global_batch": 8, "strategy": "zero1, TP 2"}],
    ],
)
def test_numbers_of_one_run_that_agree(said, rows):
    assert said(*rows) == []


def test_a_formula_in_place_of_a_measurement(said):
    ((certainty, text),) = said({**PEAK, "value": 12.6, "gpu": ""})  # 16 / 8 bytes
    assert certainty == "likely"
    assert text.startswith("12.6 GiB is the states' formula, 2 bytes x 6.738e9 parameters; the planner's least peak")
    ((certainty, text),) = said({**PEAK, "value": 13.5, "unit": "GB", "gpu": ""})
    assert (certainty, text.startswith("13.5 GB is the states' formula")) == ("likely", True)


def series(*peaks: tuple[int, float]) -> list[dict]:
    rows = {**PEAK, "model": "mine", "params": "13B", "gpu": "", "micro_batch": 1, "global_batch": ""}
    return [{**rows, "num_gpus": n, "value": value} for n, value in peaks]


def test_peaks_that_fall_as_one_over_the_gpus(said):
    ((certainty, text),) = said(*series((4, 56.8), (8, 28.4), (16, 14.2)))
    assert certainty == "likely"
    assert "4 x 56.8 GiB, 8 x 28.4 GiB, 16 x 14.2 GiB" in text
    assert said(*series((4, 56.8), (8, 28.4))) == []  # two are a chance
    assert said(*series((4, 56.8), (8, 32.4), (16, 20.2))) == []
    assert said(*series((4, 62), (8, 31), (16, 15))) == []  # rounded too far
    resting = [{**row, "metric": "memory_allocated_after_step"} for row in series((4, 56.8), (8, 28.4), (16, 14.2))]
    assert said(*resting) == []  # which should fall so


def test_speeds_that_the_planner_does_not_expect(said):
    found = said({**TOKENS, "value": 7400, "strategy": "fsdp"})  # which is above the peak, too
    (fast,) = (line for line in found if line[0] == "unexpected")
    assert "is far above the planner's" in fast[1]
    assert fast[1].endswith("the planner may be wrong")
    (slow,) = said({**TOKENS, "value": 150})
    assert (slow[0], "is far below the planner's" in slow[1]) == ("unexpected", True)
    assert said({**TIMED, **WHOLE, "value": 3000}) == []  # of one GPU, perhaps
    for value in (1200, 3000, 4000):
        assert said({**TOKENS, "value": value}) == []
    assert said({**TOKENS, "value": 150, "strategy": "zero3-cpu-offload"}) == []
    assert said({**TOKENS, "value": 150, "precision": "tf32", **CHECKPOINTED}) == []  # which the planner does not know


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    ("text", "value", "half"),
    [
        ("12", 12, 0.5), ("12.50", 12.5, 0.005), ("~12", 12, 0.5), ("1,234.5", 1234.5, 0.05), ("7e9", 7e9, 5e8),
        ("7B", 7e9, 5e8), ("1.3b", 1.3e9, 5e7), ("125 M", 125e6, 5e5),
    ],
)  # fmt: skip
def test_a_number_and_its_last_digit(text, value, half):
    read = table.read_number(text, {"k": 1e3, "m": 1e6, "b": 1e9})
    assert (read.value, read.half) == (pytest.approx(value), pytest.approx(half))


@pytest.mark.parametrize(
    "text", ["", "12,3", "1,23", "-5", "0", "nan", "inf", "0x10", "1_000", "1e400", "٣", "7B", "a"]
)
def test_no_number(text):
    assert table.read_number(text) is None


@pytest.mark.parametrize(
    ("metric", "unit", "quantity", "value"),
    [
        ("peak_memory", "GB", "peak memory", 2e9), ("nvml_memory_used", "MiB", "peak memory", 2 << 20),
        ("memory_allocated_between_steps", "bytes", "resting memory", 2),
        ("tokens_per_second", "tokens per second per GPU", "tokens", 2),
        ("throughput", "samples/sec", "sequences", 2), ("samples_per_second", "seq/s (all GPUs)", "sequences", 2),
        ("seconds_per_20_steps", "s", "step", 0.1), ("step_time", "ms", "step", 0.002),
        ("tflops_per_gpu", "TFLOPS", "flops", 2e12), ("mfu_percent", "", "mfu", 0.02),
    ],
)  # fmt: skip
def test_metric_and_unit(tmp_path, metric, unit, quantity, value):
    path = write(tmp_path / "table.csv", [{"metric": metric, "value": 2, "unit": unit}])
    result = table.read(path).rows[0].result
    assert (result.quantity, result.printed.value) == (quantity, pytest.approx(value))
    assert result.per_gpu == ("gpu" in (metric + unit).casefold() and "all" not in unit)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give a CSV"),
        (b"\n\n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "is no text in UTF-8; save the table as CSV in UTF-8"),
        (b"model,params\x00\n", "is no text"),
        (b"a,b\n1,2\n", "its head 'a,b' has none of the columns model"),
        (b"model;params\nx;7B\n", "with commas"),
        (b"model,params\n", "has no row under its head"),
        (b"model,params\n,\n", "has no row under its head"),
        (b"model,params,num_gpu\nx,7B,8\n", "column 'num_gpu' is not known; write num_gpus, or take it out"),
        (b"model,model\nx,y\n", "column model is there twice"),
        (b"model,params,num_gpus\nx,7B,eight\n", "column num_gpus has no number, such as 'eight'"),
        (b"model,params\nx,7B,8\n", "row 2 has 3 cells, the head 2"),
        (b'model,params\nx,"7B\n', "is no CSV"),
        (b"metric,value,unit\npeak_memory,3,furlong\n", "no value is understood, such as '3' 'furlong'"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, content, message):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(Refusal) as refusal:
        check.check(path)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_no_file_and_a_folder(tmp_path):
    for path, reason in ((tmp_path / "no.csv", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(Refusal, match=reason):
            check.check(path)


def test_what_is_not_understood_is_named(tmp_path):
    rows = [{**TOKENS, "value": 3000}, {**TOKENS, "value": 3000, "seq_len": "alpaca", "gpu": "titan"}]
    rows += [{**TOKENS, "value": 8, "unit": "it/s", "extra": "of a column that nobody asks for"}]
    rows += [{**TOKENS, "value": -8}] * 7
    text = check.text(check.check(write(tmp_path / "table.csv", rows)))
    assert "seq_len 'alpaca' (row 3)" in text
    assert "tokens_per_second_per_gpu in 'it/s' (row 4)" in text
    assert "gpu 'titan' (row 3)" in text
    assert "value '-8' (rows 5, 6, 7, 8, 9 and 2 more)" in text
    assert "extra" not in text


def test_rows_are_numbered_as_a_spreadsheet_does(tmp_path):
    path = write(tmp_path / "table.csv", [{**TOKENS, "value": 3000}] * 2)
    head, first, second = path.read_text().splitlines()
    path.write_text("\n".join((head, first, "", '"two\nlines"' + first.removeprefix(first.split(",")[0]), second)))
    assert [row.number for row in table.read(path).rows] == [2, 4, 5]


@pytest.mark.parametrize(
    "name", ["Llama 2 7B", "meta-llama/Llama-2-7b-hf", "someone/Llama-2-7B-chat", "llama-2-7b (SFT)"]
)
def test_a_model_is_known_under_its_usual_names(said, name):
    assert said({**TOKENS, "model": name, "value": 9000})[0][0] == "certain"


def test_names_of_the_project_are_columns_too(tmp_path):
    row = {"model": "mine", "num_params": "70B", "gpus": 8, "sequence_length": 8, "global_batch_size": 8}
    (read,) = table.read(write(tmp_path / "table.csv", [row])).rows
    assert (read.params.value, read.whole("num_gpus"), read.whole("seq_len"), read.whole("global_batch")) == (
        7e10,
        8,
        8,
        8,
    )


def test_a_model_is_not_looked_up_elsewhere(said, monkeypatch, tmp_path):
    monkeypatch.setattr(shapes, "find", lambda text: pytest.fail(f"{text} is looked up"))
    (tmp_path / "config.json").write_text("{}")
    for name in ("nobody/nothing", str(tmp_path / "config.json"), str(tmp_path)):
        said({**TOKENS, "model": name, "value": 3000})


def test_the_command(capsys, tmp_path):
    assert cli.run(["check", str(TABLES / "internevo_7b.csv")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Looked at 26 rows; rows of which each check could be made: FLOP/s against the card 26,")
    assert line.endswith("Silence is no proof.")
    assert cli.run(["check", str(TABLES / "llm_c_scripts.csv")]) == 1
    first, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("row 6: certain: 423 TFLOP/s a GPU")
    assert cli.run(["check", str(write(tmp_path / "table.csv", [{**TOKENS, "value": 150}]))]) == 0
    assert capsys.readouterr().out.startswith("row 2: unexpected: ")


ODD = [
    "", "0", "-1", "1e18", "1e-9", "99999999999999999999", "nan", "oom", "a\nb", '"', "é😀", "1,000", "7B", "zero9",
    "fp64", "a100", "GiB", "s", "%", "tok/s", "mfu", "peak_memory", "seconds_per_0_steps", "seconds_per_999999_steps",
    "x" * 300, "llama-3-70b", "gemma2-27b", "1000000", "8191", "zero1", "hsdp", "fsdp2-grad", "lion", "h200",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_odd_cells_are_a_result_or_one_line(tmp_path, seed):
    chance = random.Random(seed)
    paths = sorted(TABLES.glob("*.csv"))
    for _ in range(40):
        with open(chance.choice(paths), newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
        for _ in range(chance.randint(1, 12)):
            line = chance.choice(lines)
            line[chance.randrange(len(line))] = chance.choice(ODD)
        with open(tmp_path / "odd.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)
        try:
            said = check.text(check.check(tmp_path / "odd.csv"))
        except Refusal as refusal:
            said = f"{refusal}Silence is no proof."
        lines = said.splitlines()
        assert lines[-1].endswith("Silence is no proof.")
        assert all(line.startswith(("row", "Not understood", "Looked at", str(tmp_path))) for line in lines)
