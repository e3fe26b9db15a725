"""bitsandbytes on a CPU: one evaluation rounds the scales of weights in 4 bits, and changes the training after it.

Run: python docs/upstream/bitsandbytes_evaluation.py
"""

from __future__ import annotations

import torch
from bitsandbytes.nn import Linear4bit

torch.manual_seed(0)


def layer() -> Linear4bit:
    """Return a frozen layer in 4 bits, as QLoRA uses it: NF4, with quantized scales."""
    torch.manual_seed(1)
    full = torch.nn.Linear(256, 256)
    made = Linear4bit(256, 256, compute_dtype=torch.float32, compress_statistics=True, quant_type="nf4")
    made.load_state_dict(full.state_dict())
    return made.to("cpu").train()


inputs = torch.randn(8, 256)
never, evaluated = layer(), layer()
before = evaluated(inputs).detach()
assert torch.equal(before, never(inputs).detach())

with torch.no_grad():
    evaluated.eval()(inputs)  # as between two epochs
evaluated.train()

difference = (evaluated(inputs).detach() - before).norm() / before.norm()
print(f"training forward pass after one evaluation: relative difference {difference:.1e}")
print(f"scales: {never.weight.quant_state.absmax.dtype} before, {evaluated.weight.quant_state.absmax.dtype} after")
