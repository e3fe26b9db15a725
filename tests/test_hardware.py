"""Are the facts of a GPU found by the name that torch reports, and only by that?"""

from __future__ import annotations

import pytest

from study.theory import hardware


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16-autocast", False, 312),
        ("NVIDIA A100 80GB PCIe", "fp32", False, 19.5),
        ("NVIDIA A100 80GB PCIe", "fp32", True, 156),
        ("NVIDIA H100 80GB HBM3", "bf16", None, 989),
        ("NVIDIA H200", "fp16-autocast", False, 989),
        ("NVIDIA H100 80GB HBM3", "fp32", False, 67),
        ("NVIDIA H100 PCIe", "bf16", False, 756.5),
        ("NVIDIA B200", "bf16", False, 2250),
        ("NVIDIA L4", "bf16", False, 121),
        ("NVIDIA L4", "fp32", False, 30.3),
        ("NVIDIA A10G", "bf16", False, 70),
        ("Tesla V100-SXM2-16GB", "fp16", False, 125),
        ("Tesla T4", "fp16", False, 65),
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
    """Half precision is twice TF32 on every card that has both on tensor cores, and never slower than fp32."""
    for gpu in hardware._KNOWN.values():
        peaks = gpu.peak_flops_per_second
        assert peaks["fp16"] > peaks["fp32"]
        if "tf32" in peaks:
            assert peaks["fp16"] / peaks["tf32"] == pytest.approx(2, rel=0.03)
            assert peaks["bf16"] == peaks["fp16"]


def test_memory_is_that_of_the_card():
    """A driver keeps some of it: what is left on an H200 and a T4."""
    for name, reported in {"NVIDIA H200": 150_754_820_096, "Tesla T4": 15_828_320_256}.items():
        assert reported <= hardware.find(name).memory_bytes <= 1.1 * reported
