"""Are the facts of a GPU found by the names that torch and people use, and is a box cut as clouds cut it?"""

from __future__ import annotations

import dataclasses

import pytest

from study.theory import hardware
from study.theory.hardware import GPUS, Box, find_gpu, typical_box, usable_memory_bytes


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16-autocast", False, 312),
        ("NVIDIA A100 80GB PCIe", "fp32", False, 19.5),
        ("NVIDIA A100 80GB PCIe", "fp32", True, 156),
        ("NVIDIA H100 80GB HBM3", "pure-bf16", None, 989),
        ("Tesla T4", "bf16", False, None),  # it has no unit for it
        ("Tesla V100-SXM2-32GB", "fp32", True, None),  # nor this one for TF32
    ],
)
def test_peak_is_that_of_the_type_a_run_multiplies_in(name, precision, tf32, tera):
    peak = hardware.peak_flops_per_second(hardware.find(name), precision, tf32)
    assert peak == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H200 NVL", "AMD MI300X"])
def test_another_card_is_not_known(name):
    assert hardware.find(name) is None


def test_dense_peaks_do_not_count_sparsity():
    """Each narrower type is twice as fast on tensor cores, and none is slower than fp32."""
    for gpu in GPUS.values():
        peaks = gpu.peak_flops_per_second
        assert peaks["fp16"] > peaks["fp32"]
        if "tf32" in peaks:
            assert peaks["fp16"] / peaks["tf32"] == pytest.approx(2, rel=0.03)
            assert peaks["bf16"] == peaks["fp16"]
        if "fp8" in peaks:
            assert peaks["fp8"] / peaks["fp16"] == pytest.approx(2, rel=0.01)


def test_torch_and_people_name_the_same_gpu():
    for name, gpu in GPUS.items():
        vendor = "Tesla" if name.startswith(("t4", "v100")) else "NVIDIA"
        torch_name = f"{vendor} {gpu.torch_name}"
        assert hardware.find(torch_name) is find_gpu(torch_name) is find_gpu(name) is gpu


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-80GB", "a100-80gb"),
        ("a100_40gb", "a100-40gb"),  # as the published throughputs have it
        ("h100_80gb", "h100-sxm"),
        (" H100 ", "h100-sxm"),
        ("a100-sxm-80gb", "a100-80gb"),
        ("nvidia h200", "h200"),
    ],
)
def test_a_gpu_is_found_however_it_is_spelled(text, name):
    assert find_gpu(text) is GPUS[name]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a100", "near are a100-pcie-40gb, a100-40gb, a100-pcie-80gb, a100-80gb;"),  # which of them is not guessed
        ("v100", "v100-16gb, v100-32gb;"),
        ("a100-80g", "near are a100-80gb;"),
        ("h1000-sxm", "near are h100-sxm"),
        ("mi300x", "known are t4, v100"),
        ("", "known are t4, v100"),
    ],
)
def test_an_unknown_gpu_is_refused_with_near_names(text, says):
    with pytest.raises(ValueError, match=says) as refused:
        find_gpu(text)
    assert repr(text) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_aliases_lead_somewhere_and_hide_no_name():
    for alias, name in hardware._ALIASES.items():
        assert alias not in GPUS
        assert find_gpu(alias) is GPUS[name]


def test_memory_for_torch_is_about_what_it_was_seen_to_get():
    """Of processes that ran out of memory: what torch's allocator held, in GiB, as public issues and logs have it."""
    seen = {"t4": 14.35, "v100-32gb": 31.17, "l4": 21.77, "a100-40gb": 38.59, "h200": 138.66, "b200": 177.04}
    found = {name: usable_memory_bytes(GPUS[name]) / 2**30 for name in seen}
    assert found == pytest.approx(seen, rel=0.015)


def test_memory_for_torch_is_less_than_the_card_has_and_less_again_beside_others():
    """A driver keeps some of it: what it left on an H200 and a T4 of the study is not below the least seen."""
    for name, reported in {"h200": 150_754_820_096, "t4": 15_828_320_256}.items():
        assert GPUS[name].torch_memory_bytes <= reported <= GPUS[name].memory_bytes
    for gpu in GPUS.values():
        assert 0.85 * gpu.memory_bytes < usable_memory_bytes(gpu) < gpu.torch_memory_bytes < gpu.memory_bytes
        assert usable_memory_bytes(gpu, world_size=2) == usable_memory_bytes(gpu) - hardware.NCCL_BYTES


def test_every_fact_has_its_source():
    for gpu in GPUS.values():
        assert gpu.source
        assert gpu.price_source
        assert (gpu.price_per_hour is None) == (not gpu.price_date)
    for name, node in hardware._NODES.items():
        assert node.source
        assert name in GPUS


def test_a_link_is_counted_in_one_direction():
    """NVLink's data sheet figures of 600 and 900 GB/s, PCIe's 64 and 128, count both."""
    assert (GPUS["a100-80gb"].link, GPUS["a100-80gb"].link_bandwidth) == ("NVLink 3", 300e9)
    assert (GPUS["h100-sxm"].link, GPUS["h100-sxm"].link_bandwidth) == ("NVLink 4", 450e9)
    assert (GPUS["l4"].link, GPUS["l4"].link_bandwidth, GPUS["l4"].pcie_bandwidth) == ("PCIe 4", 32e9, 32e9)
    assert GPUS["h100-pcie"].pcie_bandwidth == 64e9


def test_gpus_fill_nodes():
    nodes = {1: 1, 3: 1, 8: 1, 16: 2, 512: 64}
    assert {count: typical_box(GPUS["h100-sxm"], count).num_nodes for count in nodes} == nodes


@pytest.mark.parametrize(
    ("num_gpus", "says"), [(0, "0 GPUs"), (-8, "-8 GPUs"), (12, "12 GPUs do not fill nodes of 8; take a multiple of 8")]
)
def test_impossible_boxes_are_refused(num_gpus, says):
    with pytest.raises(ValueError, match=says):
        Box(GPUS["a100-80gb"], num_gpus)
    with pytest.raises(ValueError, match=says):
        typical_box(GPUS["a100-80gb"], num_gpus)


def test_part_of_a_node_has_its_share_of_the_host():
    gpu = GPUS["a100-80gb"]
    whole, two_nodes, half = (typical_box(gpu, num_gpus) for num_gpus in (8, 16, 4))
    assert dataclasses.replace(two_nodes, num_gpus=8) == whole  # all is of one node
    for fact in ("host_memory_bytes", "host_memory_bandwidth", "host_cores", "disk_bytes", "disk_read_bandwidth"):
        assert getattr(half, fact) == getattr(whole, fact) / 2
    assert half.node_bandwidth == whole.node_bandwidth == 8 * 200e9 / 8
    assert "4 of 8" in half.source


def test_a_card_of_which_no_node_is_known_has_no_host():
    assert typical_box(GPUS["a100-pcie-40gb"], 8).host_memory_bytes is None


def test_a_node_without_a_local_disk_has_none_to_offload_to():
    box = typical_box(GPUS["v100-16gb"], 8)
    assert (box.disk_bytes, box.disk_read_bandwidth) == (0, 0)
