"""A training of no text: a model's steps through accelerate and the engine, and what a rank then holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import accelerate
import torch
from torch import Tensor

from ...errors import Refusal
from .. import extensions
from ..readback.facts import base_optimizer
from ..readback.states import count_states
from .watch import Watch

# ZeRO-3 has traced its order of parameters after the first step, DDP has arranged its buckets anew in the second.
STEADY_STEP = 3
RATE = 1e-6


def train(
    build: Callable[[], Any], loss: Callable[[Any, dict[str, Tensor]], Any], batch: Callable[[], dict[str, Tensor]],
    accumulation: int, blocks: Callable[[Any], list[str]],
) -> dict[str, Any]:  # fmt: skip
    """Train three steps as this rank, and say what the third held and sent.

    `blocks` names a model's classes of blocks.
    """
    watch = Watch()
    with watch:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulation)
        plugin, offloaded = accelerator.state.deepspeed_plugin, list[str]()
        if plugin is not None:
            rows = len(next(iter(batch().values())))
            asked = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": accumulation}
            for key, value in asked.items():
                if (written := plugin.deepspeed_config.get(key)) not in (None, "auto", 1, value):
                    raise Refusal(f"the file says {key} {written}: ask for as many, not for {value}")
            plugin.deepspeed_config |= asked
            zero = plugin.deepspeed_config["zero_optimization"]
            parts = {part: zero.get(f"offload_{part}", {}) for part in ("optimizer", "param")}
            offloaded = [part for part, how in parts.items() if how.get("device", "none") != "none"]
        model = build()
        fsdp_plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if fsdp_plugin is not None and not fsdp_plugin.transformer_cls_names_to_wrap:
            # Transformers' own list has BERT's embeddings in it, which accelerate 1.15 then shards a second time.
            fsdp_plugin.transformer_cls_names_to_wrap = blocks(model)
        model, optimizer = accelerator.prepare(model, _make_optimizer(model, "optimizer" in offloaded))
        states: list[dict[str, Any]] = []

        def look(*_: Any) -> None:
            if not states:  # DeepSpeed steps once per group or sub-group
                states.append(count_states(model, optimizer.optimizer, watch.bucket_bytes))

        hook = base_optimizer(optimizer).register_step_pre_hook(look)
        watch.replay()
        for _ in range(STEADY_STEP):
            states.clear()
            first_call, before = len(watch.calls), watch.held
            watch.peak = before
            for _ in range(accumulation):
                with accelerator.accumulate(model):
                    accelerator.backward(loss(model, batch()))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        hook.remove()
        peak = watch.peak
    if not states:
        raise RuntimeError(f"no optimizer stepped in step {STEADY_STEP}")
    return {
        "states": states[0],
        "before_bytes": before,
        "peak_bytes": peak,
        "reserved_bytes": {} if offloaded else watch.reserved(),  # a card's, where nothing else is
        "calls": [asdict(call) for call in watch.calls[first_call:]],
    }


def _make_optimizer(model: Any, is_offloaded: bool) -> Any:
    """AdamW by torch's default on a GPU; DeepSpeed's own on the CPU where the optimizer is offloaded."""
    if is_offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        extensions.provide(["cpu_adam"], "the offloaded optimizer")
        return DeepSpeedCPUAdam(model.parameters(), lr=RATE)
    return torch.optim.AdamW(model.parameters(), lr=RATE, foreach=True)
