"""Calls what a GPU reaches only outside of runs: a notebook's look for a GPU, GPUs by their UUID, captured graphs."""

from __future__ import annotations

import os

import torch

from study.engines import this_machine
from study.engines.prove import checksums
from study.report import colab

H100 = "NVIDIA H100 80GB HBM3"

assert colab.find_gpu() == colab.ColabGpu(H100, 9.0)
assert colab.precision(colab.ColabGpu(H100, 9.0)) == "bf16-autocast"

tensor = torch.ones(2, device="cuda")
assert checksums._sums(tensor) == (2.0, 2.0)
torch.cuda.is_current_stream_capturing = lambda: True
assert checksums._sums(tensor) is checksums.UNKNOWN

os.environ["CUDA_VISIBLE_DEVICES"] = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
assert this_machine.find().gpu_name == H100
os.environ["CUDA_VISIBLE_DEVICES"] = "7"
assert not this_machine.find().gpu_memory_bytes
