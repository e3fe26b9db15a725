"""Are the facts of a GPU found by the names that torch and people use, and is a box cut as clouds cut it?"""

from __future__ import annotations

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
        ("a100_40gb", "a100-40gb"),  # as the published throughputs have it
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
        ("h1000-sxm", "near are h100-sxm"),
        ("", "known are t4, v100"),
    ],
)
def test_an_unknown_gpu_is_refused_with_near_names(text, says):
    with pytest.raises(ValueError, match=says) as refused:
        find_gpu(text)
    assert repr(text) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_memory_for_torch_is_about_what_it_was_seen_to_get():
    """Of processes that ran out of memory: what torch's allocator held, in GiB, as public issues and logs have it."""
    seen = {"t4": 14.35, "v100-32gb": 31.17, "l4": 21.77, "a100-40gb": 38.59, "h200": 138.66, "b200": 177.04}
    found = {name: usable_memory_bytes(GPUS[name]) / 2**30 for name in seen}
    assert found == pytest.approx(seen, rel=0.015)


@pytest.mark.parametrize(("num_gpus", "says"), [(0, "0 GPUs"), (12, "12 GPUs do not fill nodes of 8; take a multiple")])
def test_impossible_boxes_are_refused(num_gpus, says):
    with pytest.raises(ValueError, match=says):
        Box(GPUS["a100-80gb"], num_gpus)
    with pytest.raises(ValueError, match=says):
        typical_box(GPUS["a100-80gb"], num_gpus)
