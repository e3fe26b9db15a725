"""How many floating-point operations does training on one sequence take?"""

from __future__ import annotations

from types import ModuleType

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from study.config import RunConfig
from study.workloads.sources import Splits


def model_flops_per_sequence(workload: ModuleType, config: RunConfig, splits: Splits) -> int:
    """Count forward and backward of one sequence: matrix products, a multiply-add as two; nothing that is recomputed.

    A sequence has `config.sequence_length` tokens, padding included, because the model multiplies it all the same.

    Counted by `torch.utils.flop_counter` on a copy of the model without storage, so it costs no memory and is the same
    for every strategy. Attention is the eager one: the counter has no formula for the CPU's fused kernel, and a
    causal mask counts in full. The word "model FLOPs" is that of arXiv:2204.02311, appendix B.
    """
    plain = config.model_copy(update={"attention": "eager", "init": "scratch", "weights": None})
    with FakeTensorMode():
        model = workload.build_model(plain, splits)
        ids = torch.zeros(1, config.sequence_length, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids).logits.sum().backward()  # a loss adds no matrix product
    return int(counter.get_total_flops())
