"""Seconds of an optimizer step, and the floating-point operations of a sequence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from study.config import RunConfig
from study.records.schema import Timing
from study.workloads.sources import Splits


def make_clock(device: torch.device) -> Callable[[], float]:
    """Return a function that waits for the device and tells the time in seconds: for the two edges of a step only."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def summarize(
    steps: Sequence[dict[str, float]],
    num_warmup_steps: int,
    probed_steps: Sequence[int],
    resumed_at: Sequence[int] = (),
) -> Timing:
    """Summarize step times without probed steps and the first `num_warmup_steps` of each process that took some.

    `resumed_at`: the steps after which another process went on. Null where no step is left.
    """
    left_out = {start + n for start in (0, *resumed_at) for n in range(1, num_warmup_steps + 1)} | {*probed_steps}
    timed = [s for s in steps if s["step"] not in left_out]
    seconds = [s["seconds"] for s in timed]
    middle = statistics.median(seconds) if seconds else None
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (None, None, None)
    return Timing(
        num_steps=len(timed),
        num_warmup_steps=num_warmup_steps,
        probed_steps=list(probed_steps),
        median_seconds=middle,
        lower_quartile_seconds=quartiles[0],
        upper_quartile_seconds=quartiles[2],
        data_wait_median_seconds=statistics.median(s["data_wait_seconds"] for s in timed) if timed else None,
        samples_per_second=timed[0]["samples"] / middle if middle is not None else None,
        tokens_per_second=statistics.mean(s["tokens"] for s in timed) / middle if middle is not None else None,
    )


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
