"""Does the table of what was accepted say what passed, what failed and what was not run, each with its reason?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import synthetic

from study.compare import acceptance

GPU = {"workload": "bert-imdb", "world_size": 1, "box": "gpu", "study": "s", "num_steps": 10, "dropout": 0}
GPU |= {"precision": "bf16-autocast"}


def rows(page: str) -> dict[str, dict[str, str]]:
    """The first table of a page: strategy -> check -> cell."""
    lines = [line for line in page.split("\n## ")[0].splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0].strip("`"): dict(zip(head[1:], cells[1:], strict=True)) for cells in body}


def change(path: Path, **facts: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


@pytest.fixture
def page(tmp_path) -> str:
    synthetic.write_run(tmp_path, strategy="single", **GPU)
    synthetic.write_run(tmp_path, strategy="ddp", **GPU)
    synthetic.write_run(tmp_path, strategy="zero1", **GPU, loss_shift=0.1)
    synthetic.write_run(tmp_path, strategy="zero2", **GPU | {"precision": "bf16"})
    change(synthetic.write_run(tmp_path, strategy="zero3", **GPU, seconds=0.001), energy_joules=None)
    synthetic.write_run(tmp_path, strategy="zero3", **GPU | {"world_size": 2}, share_device=True)
    synthetic.write_run(tmp_path, strategy="zero2_tuned", **GPU, compile=True)
    synthetic.write_run(tmp_path, strategy="zero0", **GPU, status="out_of_memory")
    synthetic.write_run(tmp_path, strategy="zero1_cpu_offload", **GPU | {"seed": 7})
    skipped = {"strategy": "fsdp2", "world_size": 1, "message": "fsdp2 is not for this box"}
    synthetic.write_outcome(tmp_path, "skipped", **skipped)
    return acceptance.table([tmp_path])


def test_what_works_is_ok(page):
    found = rows(page)
    assert list(found) == [
        *("single", "ddp", "fsdp2", "zero0", "zero1", "zero1_cpu_offload", "zero2", "zero2_tuned", "zero3")
    ]
    nothing = dict.fromkeys(("fp32", "fp16", "compiled", "shared GPU"), "")
    observed = dict.fromkeys(("NCCL", "energy", "NVML", "batches"), "ok")
    assert found["ddp"] == nothing | {"bf16": "ok", "as single": "ok"} | observed
    assert found["single"] == found["ddp"] | {"as single": "", "NCCL": ""}  # others are held against it
    assert found["zero2"] == found["ddp"]  # 16-bit parameters, against autocast
    assert found["zero2_tuned"] == found["ddp"] | {"compiled": "ok", "bf16": ""}
    assert "1 x NVIDIA H200" not in page  # the synthetic box has eight
    assert "8 x NVIDIA H200: " in page


def test_what_failed_says_why(page):
    found = rows(page)
    assert found["zero0"]["bf16"] == "**failed**"
    assert found["zero0"]["as single"] == ""
    reason = "bert-imdb-tiny-zero0-1x-seed0-batch8-bf16_autocast-dropout_0.0: out_of_memory: synthetic: out_of_memory"
    assert f"- failed: bf16 of `zero0`: {reason}" in page
    assert (found["zero1"]["bf16"], found["zero1"]["as single"]) == ("ok", "**failed**")
    assert "from `single`'s, at most 0.01" in page
    assert (found["zero3"]["bf16"], found["zero3"]["shared GPU"]) == ("ok", "ok")
    assert (found["zero3"]["energy"], found["zero3"]["batches"]) == ("**failed**", "**failed**")
    assert "the host waited for them more than 20% of a step, or no step was timed" in page


def test_what_was_not_run_says_why(page):
    found = rows(page)
    assert found["fsdp2"]["fp32"] == "not run"
    assert "- not run: fp32 of `fsdp2`: fsdp2 is not for this box" in page
    assert found["zero1_cpu_offload"]["as single"] == "not run"  # of another seed
    assert "as single of `zero1_cpu_offload`: no finished run of `single` with the same work" in page


def test_fp32_is_held_to_less(tmp_path):
    for strategy in ("single", "ddp"):
        synthetic.write_run(tmp_path, strategy=strategy, **GPU | {"precision": "fp32"})  # apart by 2e-4
    assert rows(acceptance.table([tmp_path]))["ddp"]["as single"] == "**failed**"


def test_a_single_of_another_arithmetic_is_no_reference(tmp_path):
    synthetic.write_run(tmp_path, strategy="single", **GPU)
    synthetic.write_run(tmp_path, strategy="ddp", **GPU, machine={"tf32": True})
    page = acceptance.table([tmp_path])
    assert "as single of `ddp`: no finished run of `single` with the same work with tf32=True" in page
