"""What can a GPU do at most? Memory and dense peaks of the cards that the study may meet, by the name torch reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One GPU; peaks are those of dense matrix products, without the sparsity that data sheets like to count."""

    memory_bytes: int  # as built; the driver keeps some, so that torch reports a little less
    peak_flops_per_second: dict[str, float]  # fp32, tf32, fp16, bf16; a type that is not there has no unit of its own
    source: str


def _gpu(gib: int, source: str, **tera: float) -> Hardware:
    return Hardware(gib * 2**30, {kind: value * 1e12 for kind, value in tera.items()}, source)


_A100 = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}
_A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet"
_HOPPER_SXM = {"fp32": 67, "tf32": 494.5, "fp16": 989, "bf16": 989}
_H100_SHEET = "NVIDIA H100 Tensor Core GPU data sheet, tensor cores at half the figures, which are with sparsity"
_V100_SHEET = "NVIDIA V100 Tensor Core GPU data sheet"

# By the name without its vendor. Whole names, because a slice of a card (MIG) or a sister model is another card.
_KNOWN = {
    "T4": _gpu(16, "NVIDIA T4 Tensor Core GPU data sheet", fp32=8.1, fp16=65),
    "V100-PCIE-16GB": _gpu(16, _V100_SHEET, fp32=14, fp16=112),
    "V100-PCIE-32GB": _gpu(32, _V100_SHEET, fp32=14, fp16=112),
    "V100-SXM2-16GB": _gpu(16, _V100_SHEET, fp32=15.7, fp16=125),
    "V100-SXM2-32GB": _gpu(32, _V100_SHEET, fp32=15.7, fp16=125),
    "A10G": _gpu(24, "NVIDIA A10G data sheet, for Amazon EC2 G5", fp32=35, tf32=35, fp16=70, bf16=70),
    "A100-PCIE-40GB": _gpu(40, _A100_SHEET, **_A100),
    "A100-SXM4-40GB": _gpu(40, _A100_SHEET, **_A100),
    "A100 80GB PCIe": _gpu(80, _A100_SHEET, **_A100),
    "A100-SXM4-80GB": _gpu(80, _A100_SHEET, **_A100),
    "L4": _gpu(
        24, "NVIDIA L4 data sheet, tensor cores at half the figures, which are with sparsity",
        fp32=30.3, tf32=60, fp16=121, bf16=121,
    ),
    "H100 PCIe": _gpu(80, _H100_SHEET, fp32=51, tf32=378, fp16=756.5, bf16=756.5),
    "H100 80GB HBM3": _gpu(80, _H100_SHEET, **_HOPPER_SXM),
    "H200": _gpu(141, _H100_SHEET.replace("H100", "H200"), **_HOPPER_SXM),
    "B200": _gpu(
        180, "NVIDIA Blackwell Architecture Technical Brief, HGX B200, per GPU and dense",
        fp32=80, tf32=1100, fp16=2250, bf16=2250,
    ),
}  # fmt: skip


def find(name: str) -> Hardware | None:
    """Find a GPU by the name that torch reports; None where it is not known."""
    return _KNOWN.get(name.removeprefix("NVIDIA ").removeprefix("Tesla "))


def peak_flops_per_second(gpu: Hardware, precision: str, tf32: bool | None) -> float | None:
    """The peak of the type in which a run of this precision class multiplies; None where the card has no unit for it.

    `tf32`: whether fp32 products may take tensor cores, as the run's machine says.
    """
    kind = precision.removesuffix("-autocast")
    return gpu.peak_flops_per_second.get("tf32" if kind == "fp32" and tf32 else kind)
