"""Does the table of what was accepted say what passed, what failed and what was not run, each with its reason?"""

from __future__ import annotations

import re

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


@pytest.fixture
def page(tmp_path) -> str:
    synthetic.write_run(tmp_path, strategy="single", **GPU)
    synthetic.write_run(tmp_path, strategy="ddp", **GPU)
    synthetic.write_run(tmp_path, strategy="zero1", **GPU, loss_shift=0.1)
    synthetic.write_run(tmp_path, strategy="zero2", **GPU | {"precision": "bf16"})
    synthetic.change(synthetic.write_run(tmp_path, strategy="zero3", **GPU, seconds=0.001), energy_joules=None)
    synthetic.write_run(tmp_path, strategy="zero3", **GPU | {"world_size": 2}, share_device=True)
    synthetic.write_run(tmp_path, strategy="zero2_tuned", **GPU, compile=True)
    synthetic.write_run(tmp_path, strategy="zero0", **GPU, status="out_of_memory")
    synthetic.write_run(tmp_path, strategy="zero1_cpu_offload", **GPU | {"seed": 7})
    skipped = {"strategy": "fsdp2", "world_size": 1, "message": "fsdp2 is not for this box"}
    synthetic.write_outcome(tmp_path, "skipped", **skipped)
    return acceptance.table([tmp_path])


def test_what_works_is_ok(page):
    found = rows(page)
    strategies = "single ddp fsdp2 zero0 zero1 zero1_cpu_offload zero2 zero2_tuned zero3"
    assert list(found) == strategies.split()
    nothing = dict.fromkeys(("fp32", "fp16", "compiled", "shared GPU"), "")
    observed = dict.fromkeys(("NCCL", "energy", "NVML", "batches"), "ok")
    assert found["ddp"] == nothing | {"bf16": "ok", "as single": "ok"} | observed
    assert found["single"] == found["ddp"] | {"as single": "", "NCCL": ""}  # others are held against it
    assert found["zero2"] == found["ddp"]  # 16-bit parameters, against autocast
    assert found["zero2_tuned"] == found["ddp"] | {"compiled": "ok", "bf16": ""}
    assert "\n8 x NVIDIA H200: " in page
    cells = [cell for row in found.values() for cell in row.values()]
    counts = [f"{cells.count(shown)} {name}" for shown, name in (("ok", "ok"), ("**failed**", "failed"))]
    assert f"{', '.join(counts)}, {cells.count('not run')} not run." in page
    assert page.partition("## How far from `single`")[2].count("\n| bert-imdb-tiny-") == 6  # one of them on two ranks


def test_what_failed_or_was_not_run_says_why(page):
    found = rows(page)
    assert (found["zero0"]["bf16"], found["zero0"]["as single"]) == ("**failed**", "")
    assert re.search("- failed: bf16 of `zero0`: bert-imdb-tiny-zero0-.*: out_of_memory: synthetic: out_of_", page)
    assert (found["zero1"]["bf16"], found["zero1"]["as single"]) == ("ok", "**failed**")
    assert "from `single`'s, at most 0.01" in page
    assert (found["zero3"]["bf16"], found["zero3"]["shared GPU"]) == ("ok", "ok")
    assert (found["zero3"]["energy"], found["zero3"]["batches"]) == ("**failed**", "**failed**")
    assert found["fsdp2"]["fp32"] == "not run"
    assert "- not run: fp32 of `fsdp2`: fsdp2 is not for this box" in page
    assert found["zero1_cpu_offload"]["as single"] == "not run"  # of another seed
    assert "as single of `zero1_cpu_offload`: no finished run of `single` with the same work" in page


def test_fp32_is_held_to_less_and_another_arithmetic_to_nothing(tmp_path):
    for strategy in ("single", "ddp"):
        synthetic.write_run(tmp_path, strategy=strategy, **GPU | {"precision": "fp32"})  # apart by 2e-4
    synthetic.write_run(tmp_path, strategy="zero1", **GPU | {"precision": "fp32"}, machine={"tf32": True})
    page = acceptance.table([tmp_path])
    assert rows(page)["ddp"]["as single"] == "**failed**"
    assert "as single of `zero1`: no finished run of `single` with the same work with tf32=True" in page


def test_on_a_cpu_nothing_of_a_gpu_is_asked(tmp_path):
    for strategy in ("single", "zero3"):
        synthetic.write_run(tmp_path, strategy=strategy, **GPU | {"precision": "fp32", "box": "cpu"})
    page = acceptance.table([tmp_path])
    found = rows(page)["zero3"]
    assert (found["fp32"], found["as single"]) == ("ok", "ok")
    assert {found[check] for check in ("NCCL", "energy", "NVML", "batches")} == {"not run"}
    assert "- not run: NCCL, energy, NVML, batches of `single`, `zero3`: on a CPU" in page
