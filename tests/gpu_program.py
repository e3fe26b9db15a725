"""Calls what a GPU reaches only outside of runs, or in runs that are refused.

These are a notebook's look for a GPU, GPUs by their UUID, captured graphs, estimates for a GPU without data, ranks on
too few GPUs, and bitsandbytes's kernel that multiplies weights in 4 bits with few rows.
"""

from __future__ import annotations

import os

import bitsandbytes
import pytest
import torch
from bitsandbytes import cextension

from study.report import colab
from study.running import studies
from study.running.estimate import History
from study.training import proof
from zero_study.engines import this_machine
from zero_study.errors import Refusal
from zero_study.prove import checksums

H100 = "NVIDIA H100 80GB HBM3"

assert colab.find_gpu() == colab.ColabGpu(H100, 9.0)
assert colab.precision(colab.ColabGpu(H100, 9.0)) == "bf16-autocast"

tensor = torch.ones(2, device="cuda")
assert checksums._sums(tensor) == (2.0, 2.0)
torch.cuda.is_current_stream_capturing = lambda: True
assert checksums._sums(tensor) is checksums.UNKNOWN

for compute_type, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
    layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=compute_type, quant_type="nf4").to("cuda")
    inputs = torch.ones(2, 64, device="cuda", dtype=compute_type)
    product = layer(inputs)  # of so few rows that bitsandbytes multiplies by its own kernel
    state = layer.weight.quant_state
    assert getattr(cextension.lib, f"cgemm_4bit_{name}").num_calls == 1
    assert getattr(cextension.lib, f"cdequantize_blockwise_{name}_nf4").num_calls == 0
    weights = bitsandbytes.functional.dequantize_4bit(layer.weight.data, state).to(compute_type)
    expected = torch.nn.functional.linear(inputs, weights, layer.bias)
    assert product.is_cuda
    assert torch.allclose(product, expected, rtol=1e-2)
assert cextension.lib.cquantize_blockwise_fp32_nf4.num_calls == 2

own, shared = (
    next(run for run in studies.runs(studies.find(name)) if run.world_size == 2) for name in ("multi-gpu", "shared-gpu")
)
for run in (own, shared):  # on a GPU that the planner does not know
    assert History(on_gpu=True).estimate(run).seconds > 0
assert proof.verify_gpus(["first", "second"], own) == 2
with pytest.raises(Refusal):
    proof.verify_gpus(["first", "first"], own)

os.environ["CUDA_VISIBLE_DEVICES"] = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
assert this_machine.find().gpu_name == H100
os.environ["CUDA_VISIBLE_DEVICES"] = "7"
assert not this_machine.find().gpu_memory_bytes
