"""Show that the first step of ZeRO stage 0 in bf16 is about half as long as that of stage 1 (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 zero0_bf16.py
"""

import deepspeed
import torch

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 0.1, "weight_decay": 0.0}


def first_step(stage: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16, bias=False)
    start = model.weight.detach().bfloat16().float()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **SETTINGS),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
        },
    )
    inputs = torch.arange(256.0).reshape(16, 16).div(256).bfloat16()
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    masters = engine.optimizer.fp32_groups[0] if stage == 0 else engine.optimizer.single_partition_of_fp32_groups
    moved = torch.cat([master.detach().flatten() for master in masters]) - start.flatten()
    engine.destroy()
    return moved


deepspeed.init_distributed("gloo")
right, stage_0 = first_step(1), first_step(0)
print(f"stage 0 moves {float(stage_0 @ right / (right @ right)):.3f} of what stage 1 moves")
