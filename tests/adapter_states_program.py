"""Train one step of a small model with LoRA on one rank of a process group, and print the bytes of its model states.

torchrun --nproc_per_node 2 tests/adapter_states_program.py zero1|zero2|zero3|fsdp2
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from zero_study.engines.readback.states import count_states

HIDDEN, LAYERS, VOCABULARY, RANK = 64, 2, 256, 4


def adapted() -> Any:
    """Return a small Llama in bf16 with adapters in fp32, as PEFT creates them."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"]))


def under_deepspeed(stage: int) -> dict[str, Any]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = adapted()
    sizes = {"reduce_bucket_size": 10000, "overlap_comm": False}
    if stage == 3:
        sizes |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 10000}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **sizes},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    words = torch.randint(0, VOCABULARY, (1, 16))
    engine.backward(engine(input_ids=words, labels=words).loss)
    engine.step()
    return count_states(engine.module, optimizer)


def under_fsdp2() -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    model = adapted()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.base_model.model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    words = torch.randint(0, VOCABULARY, (1, 16))
    model(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return count_states(model, optimizer)


if __name__ == "__main__":
    name = sys.argv[1]
    states = under_fsdp2() if name == "fsdp2" else under_deepspeed(int(name[-1]))
    if os.environ["RANK"] == "0":
        print("STATES", json.dumps(states), flush=True)
    dist.destroy_process_group()
