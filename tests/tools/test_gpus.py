"""GPUs by name and by numbers, and the machine that a prediction assumes."""

from __future__ import annotations

import csv
import dataclasses
import json
import math

import pytest
from refusing import refusal

from zero_study import cli
from zero_study.errors import Refusal
from zero_study.planner.request import Request, reading
from zero_study.theory import cards, gpus, hardware, intervals, shapes, step_time
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.gpus import GPUS, find_gpu
from zero_study.theory.step_time import FITTED, constants_of

BY_NUMBERS = ["--gpu-memory", "48", "--gpu-tflops", "362", "--gpu-bandwidth", "864"]
LLAMA = ["--model", "llama-3.1-8b", "--gpus", "8"]
LISTED = {  # GPUs that people asked for or own, apart from those of large clouds
    "rtx-3090", "rtx-4090", "rtx-5090", "rtx-a6000", "rtx-6000-ada", "rtx-pro-6000", "rtx-pro-6000-max-q",
    "rtx-pro-6000-server", "a10", "a40", "l40", "l40s", "a800-80gb", "h800", "h20", "h100-nvl", "h200-nvl", "gh200",
    "gb200", "b300", "gb300", "mi250x", "mi300x", "mi325x", "mi355x", "gaudi2", "gaudi3",
}  # fmt: skip


def told(capsys, *arguments: str) -> dict:
    cli.run(["advise", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------- the table


def test_every_gpu_has_every_number_and_a_source():
    assert GPUS.keys() >= LISTED
    for name, gpu in GPUS.items():
        numbers = [getattr(gpu, field.name) for field in dataclasses.fields(gpu) if field.name.endswith("bandwidth")]
        numbers += [gpu.memory_bytes, gpu.torch_memory_bytes, *gpu.peak_flops_per_second.values()]
        assert all(0 < number < math.inf for number in numbers), name
        assert 0.9 < gpu.torch_memory_bytes / gpu.memory_bytes < 1, name
        assert 0 <= gpu.context_bytes < 2**30, name
        assert all((gpu.source, gpu.link, gpu.torch_name)), name
        assert (gpu.price_per_hour is None) == (gpu.price_source == "not found"), name
        assert constants_of(gpu.generation).product_efficiency > 0, name


def test_geforce_rates_are_those_with_accumulation_in_fp32():
    """The rate with accumulation in fp16 is twice as high, and no product of PyTorch uses it."""
    for name, tera in (("rtx-3090", 71), ("rtx-4090", 165), ("rtx-5090", 209)):
        assert GPUS[name].peak_flops_per_second["bf16"] == pytest.approx(tera * 1e12, rel=0.01)


def test_tensor_cores_at_half_rate_reach_what_is_listed():
    """Cards whose rate with fp32 accumulation is half of that with fp16 accumulation, and an H20."""
    reference = cards.share_of_peak(GPUS["a100-80gb"])
    for name in ("rtx-3090", "rtx-4090", "rtx-5090", "a10g", "l40", "h20"):
        assert 0.95 < cards.share_of_peak(GPUS[name]) < 1.2, name
    for name in ("rtx-a6000", "a40", "l40s", "rtx-6000-ada", "v100-32gb", "t4", "rtx-pro-6000"):
        assert 0.6 < cards.share_of_peak(GPUS[name]) < reference, name
    assert cards.share_of_peak(GPUS["l4"]) is None


def test_rates_of_the_card_of_the_fitted_constants_are_the_fitted_ones():
    for name, nearest in (("a100-80gb", "Ampere"), ("h100-sxm", "Hopper")):
        gpu = GPUS[name]
        assert cards.relative_share(gpu, nearest) == 1.0
        assert cards.operand_share(gpu, nearest, 0.3, 0.85) == pytest.approx(0.3)
        assert cards.flash_share(gpu, nearest, 0.4) == pytest.approx(0.4)


def test_operands_are_faster_with_more_bandwidth_and_with_more_multiprocessors():
    rates = {}
    for name in ("a100-40gb", "a100-80gb", "rtx-3090", "rtx-4090"):
        rates[name] = cards.operand_share(GPUS[name], "Ampere", 0.3, 0.85) * GPUS[name].memory_bandwidth
    assert rates["a100-40gb"] < rates["a100-80gb"] < rates["a100-40gb"] * 2039 / 1555
    assert rates["rtx-4090"] > 1.3 * rates["rtx-3090"]  # 1.1 times the bandwidth, 2.3 times the clocks
    assert cards.operand_share(GPUS["b200"], "Hopper", 0.3, 0.85) == 0.3


def test_products_were_measured_on_cards_that_are_listed():
    with open(cards.MATRIX_PRODUCTS, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["gpu"] != "v100s":  # a V100 with another clock, which is not listed
            listed = GPUS[row["gpu"]].peak_flops_per_second[row["type"]]
            assert float(row["listed_teraflops"]) * 1e12 == pytest.approx(listed), row
    assert {"v100s", *GPUS} >= {row["gpu"] for row in rows}
    assert cards._SAME_CHIP.keys() | cards._SAME_ENERGY.keys() <= GPUS.keys()


def test_no_two_gpus_share_a_name():
    names = [gpus._compact(name) for name in GPUS] + [gpus._compact(gpu.torch_name) for gpu in GPUS.values()]
    owners = {compact: gpus._BY_COMPACT_NAME[compact].name for compact in names}
    assert all(owners[gpus._compact(name)] == name for name in GPUS)
    assert all(owners[gpus._compact(gpu.torch_name)] == gpu.name for gpu in GPUS.values())
    assert not {gpus._compact(alias) for alias in gpus._ALIASES} & {gpus._compact(name) for name in GPUS}


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("t4", ",320,PCIe 3,", ",fast,PCIe 3,", "memory_gb_per_s='fast': input should be a valid number"),
        ("t4", ",320,PCIe 3,", ",nan,PCIe 3,", "memory_gb_per_s='nan': input should be a finite number"),
        ("t4", ",320,PCIe 3,", ",,PCIe 3,", "memory_gb_per_s is missing"),
        ("t4", ",320,PCIe 3,", ",PCIe 3,", "the row has 19 cells, but the header has 20"),
        ("rtx-3090", ",320,PCIe 3,16,", ",320,PCIe 4,16,", "link_gb_per_s of PCIe 4 is 16 in an earlier row"),
        ("t4", ",messages,8.1,", ",message,8.1,", "memory_basis='message': input should be 'messages', 'same chip' or"),
        ("t4", ",16,14.56,", ",14.56,16,", "context_gib must be less than torch_gib, and torch_gib less than"),
        ("t4", ",8.1,,65,", ",8.1,,,", "it needs fp16_tflops or bf16_tflops"),
        ("t4", ",0.978,2025,", ",0.978,,", "fill in all of price_per_hour, price_date and price_source"),
        ("t4", ",fp32_tflops,", ",fp32,", "unknown key 'fp32'"),
        ("t4", '"g4dn.metal,', "g4dn.metal,", "the row has 23 cells"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(name, old, new, says, tmp_path):
    text, path = gpus.FILE.read_text(), tmp_path / "gpus.csv"
    path.write_text(text.replace(old, new, 1))
    assert path.read_text() != text
    number = text[: text.index(f"\n{name},")].count("\n") + 2
    with pytest.raises(Refusal) as refused:
        gpus.read_gpus(path)
    assert str(refused.value).startswith(f"{path}, line {number} ({name}): {says}")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("h100-sxn,h100-sxn", "it needs an alias and the name of a GPU in gpus.csv"),
        ("h100-sxn", "the row has 1 cells, but the header has 2"),
        ("h100,h100-sxm", "h100 is listed twice"),
        ("", "the row has 0 cells"),
    ],
)
def test_a_wrong_alias_is_refused_with_its_line(line, says, tmp_path):
    text, path = gpus.ALIASES_FILE.read_text(), tmp_path / "gpu_aliases.csv"
    path.write_text(f"{text}{line}\n")
    with pytest.raises(Refusal) as refused:
        gpus.read_aliases(GPUS, path)
    place = f"{path}, line {text.count(chr(10)) + 1} ({line.partition(',')[0]})"
    assert str(refused.value).startswith(f"{place}: {says}")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("RTX_4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("mi-300x", "mi300x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("h100 sxm", "h100-sxm"),
        ("a100_80", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("rtx 6000 pro", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("gaudi 3", "gaudi3"),
    ],
)
def test_spellings_of_people_are_understood(text, name):
    assert find_gpu(text) is GPUS[name]


@pytest.mark.parametrize(
    ("text", "suggested"),
    [("4O90", "rtx-4090"), ("mi300", "mi300x"), ("nvidiah100", "h100-sxm"), ("a1", "a100-40gb"),
     ("rtx-40", "rtx-4090")],
)  # fmt: skip
def test_names_that_are_nearly_right_are_suggested(text, suggested):
    with pytest.raises(ValueError, match=f"Did you mean .*{suggested}"):
        find_gpu(text)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [("a100-pcie", ["a100-pcie-40gb", "a100-pcie-80gb"]), ("NVIDIA A100 PCIe", ["a100-pcie-40gb"]),
     ("v100", ["v100-16gb", "v100-32gb"]), ("gaudi", ["gaudi2", "gaudi3"]),
     ("rtx 6000", ["rtx-pro-6000", "rtx-6000-ada"])],
)  # fmt: skip
def test_a_name_that_fits_several_gpus_is_asked_back(text, kinds):
    with pytest.raises(ValueError, match="Which one") as refused:
        find_gpu(text)
    assert "unknown" not in str(refused.value)
    assert all(find_gpu(kind).name == kind for kind in kinds)
    assert all(kind in str(refused.value) for kind in kinds)


@pytest.mark.parametrize(
    ("text", "name", "others"),
    [("a100", "a100-80gb", ["a100-40gb", "a100-pcie-40gb", "a100-pcie-80gb"]),
     ("h100", "h100-sxm", ["h100-pcie", "h100-nvl"]), ("a100-80gb", "a100-80gb", []), ("4090", "rtx-4090", [])],
)  # fmt: skip
def test_the_answer_says_how_a_name_of_several_gpus_is_read(text, name, others, capsys):
    assert find_gpu(text).name == name
    for question in (["--gpus", "2"], []):
        cli.run(["advise", "--model", "gpt2", "--gpu", text, *question])
        said = f"{text} is read as {name}" in " ".join(capsys.readouterr().out.split())
        assert said == bool(others)
    assert all(other in reading(text) for other in others)


def test_gpu_list_shows_every_name(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    cli.run(["advise", "--gpu", "list"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1 : len(GPUS) + 1]] == list(GPUS)


# ---------------------------------------------------------------- by numbers


def test_newer_kernels_of_attention_need_their_gpus():
    assert Request("h200", attention="flash-3").job().attention == "flash-3"
    with pytest.raises(Refusal, match="--attention flash-3 needs a Hopper GPU such as H100, but the GPU is a100-80gb"):
        Request("a100-80gb", attention="flash-3").job()


def test_numbers_alone_make_a_gpu(capsys):
    result = told(capsys, *LLAMA, *BY_NUMBERS)
    named = told(capsys, *LLAMA, "--gpu", "l40s")
    assert (result["gpu"], result["price_per_gpu_hour"]) == ("custom GPU", None)
    assert result["usable_bytes_per_gpu"] < named["usable_bytes_per_gpu"]  # estimated by the smallest known share
    seconds = {option["strategy"]: option["seconds_per_step"] for option in named["strategies"]}
    for option in result["strategies"]:
        assert option["seconds_per_step_high"] > option["seconds_per_step"] > 0
        if option["strategy"] == "fsdp2":  # an L40S is predicted from measured products, other GPUs as an A100
            assert option["seconds_per_step"] == pytest.approx(seconds["fsdp2"], rel=0.15)


def test_numbers_replace_those_of_a_named_gpu():
    base = GPUS["rtx-4090"]
    doubled = Request("4090", gpu_memory=48).box(1).gpu  # sold in China with twice the memory
    assert doubled.memory_bytes == 2 * base.memory_bytes
    assert doubled.torch_memory_bytes == pytest.approx(2 * base.torch_memory_bytes)
    assert doubled.peak_flops_per_second == base.peak_flops_per_second
    assert (doubled.memory_basis, doubled.price_per_hour) == ("estimated", None)
    faster = Request("4090", gpu_tflops=330.4).box(1).gpu
    assert faster.peak_flops_per_second["fp8"] == pytest.approx(2 * base.peak_flops_per_second["fp8"])
    assert Request("4090").box(1).gpu is base
    changed = Request("h100", gpu_bandwidth=3000).box(8)
    assert changed.source == Request("h100").box(8).source  # the machine is the same


@pytest.mark.parametrize(("tera", "nearest"), [(362, "Ampere"), (900, "Hopper")])
def test_time_constants_are_those_of_the_nearest_generation(tera, nearest):
    gpu = gpus.from_numbers(None, 48, tera, 864)
    assert constants_of(gpu.generation) == FITTED[nearest]
    shape, engine = shapes.find("gpt2"), Engine("ddp", 0, 8, "bf16-autocast", 4)
    assert intervals.evidence(shape, engine, hardware.Cluster(gpu, 8), StepConfig(1, 1024)).is_far


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (BY_NUMBERS[:4], "without --gpu, a GPU needs all of --gpu-memory"),
        ([*BY_NUMBERS, "--precision", "fp32"], "--precision fp32: custom GPU does not support it. It supports fp16"),
        (["--gpu", "4090", "--gpu-memory", "0"], "gpu_memory=0.0: must be a number above 0, in GiB"),
        (["--gpu", "4090", "--host-memory", "nan"], "host_memory=nan: must be a number above 0"),
        (["--gpu", "4090", "--disk-bandwidth", "1,2,3"], "--disk-bandwidth 1,2,3: must be one number, or two"),
    ],
)
def test_what_is_missing_is_named(arguments, says):
    assert refusal(cli.run, ["advise", *LLAMA, *arguments]).startswith(says)


# ---------------------------------------------------------------- machines


def test_a_part_of_a_node_has_the_whole_host():
    whole, part = (hardware.typical_box(GPUS["a100-80gb"], count) for count in (8, 2))
    assert dataclasses.replace(part, num_gpus=8) == whole
    assert hardware.whole_host_note(whole) is None
    assert "2 of its 8 GPUs" in hardware.whole_host_note(part)
    rented = hardware.rented_box(GPUS["a100-80gb"], 2)
    assert 4 * rented.host_memory_bytes == whole.host_memory_bytes
    assert (4 * rented.host_cores, rented.source) == (whole.host_cores, f"2 of 8 parts of {whole.source}")
    own = Request("a100-80gb", 2, host_memory=64, host_cores=8, host_bandwidth=50).box()
    assert own.host_memory_bytes == 64 * 2**30
    assert hardware.whole_host_note(own) is None


def test_the_ranks_in_use_share_the_whole_host():
    shape = shapes.find("gpt2-xl")

    def host_seconds(ranks: int) -> float:
        engine = Engine("deepspeed", 2, ranks, "bf16", 4, offload_optimizer="cpu")
        box = hardware.typical_box(GPUS["a100-80gb"], ranks)
        return step_time._host_step(shape.num_params / ranks, engine, box, step_time.HOST_THREAD_BANDWIDTH)

    # The same work by the same host. Only the transfer to a single GPU takes longer.
    assert host_seconds(8) < host_seconds(1) < 1.5 * host_seconds(8)


def test_options_of_the_machine_replace_what_is_assumed():
    request = Request(
        "4090", 16, gpus_per_node=4, host_memory=256, host_cores=32, host_bandwidth=160, disk=4,
        disk_bandwidth=(7.0, 5.0), link_bandwidth=20, network_gbps=100,
    )  # fmt: skip
    box = request.box()
    assert (box.num_nodes, box.host_memory_bytes, box.host_cores) == (4, 256 * 2**30, 32)
    assert (box.host_memory_bandwidth, box.disk_bytes, box.gpu.link_bandwidth) == (160e9, 4e12, 20e9)
    assert (box.disk_read_bandwidth, box.disk_write_bandwidth, box.node_bandwidth) == (7e9, 5e9, 12.5e9)
    words = dict(hardware.described(box))
    assert words["host"] == "256 GiB (given), 32 cores (given), 160 GB/s (given) per node"
    assert "20 GB/s in one direction (given)" in words["link"]
    assert "100 Gbit/s per node (given)" in words["nodes"]


def test_every_assumption_about_the_machine_is_described():
    for gpu in GPUS.values():
        for count in (1, 8, 16):
            words = dict(hardware.described(hardware.typical_box(gpu, count)))
            assert words.keys() >= {"GPU", "link", "nodes", "host", "disks", "not included"}
            assert ("estimated" in words["GPU"]) == (gpu.memory_basis == "estimated")
    assert (
        "--host-memory, --host-cores, --host-bandwidth must be given"
        in dict(hardware.described(hardware.Cluster(GPUS["rtx-4090"], 2)))["host"]
    )


def test_nvlink_of_a_rack_connects_its_trays():
    inside, outside = (hardware.typical_box(GPUS["gb200"], count) for count in (72, 76))
    assert (inside.num_nodes, inside.gpus_per_node) == (18, 4)
    assert (inside.node_bandwidth, outside.node_bandwidth) == (4 * 900e9, 4 * 50e9)


def test_host_options_are_whole_and_finite():
    for wrong in ({"host_cores": 0}, {"disk": -1}, {"disk_bandwidth": (1.0, 0.0)}, {"link_bandwidth": math.inf}):
        with pytest.raises(Refusal, match=next(iter(wrong))):
            Request("l40s", **wrong)
