"""Show that ZeRO stage 0 in fp16 divides gradients by a loss scale that it did not apply (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 zero0_fp16.py
"""

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

get_accelerator().is_fp16_supported = lambda: True  # some CPUs compute fp16 too slowly for DeepSpeed


def first_step(stage: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16, bias=False)
    start = model.weight.detach().half().float()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "fp16": {"enabled": True, "initial_scale_power": 8},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    inputs = torch.arange(256.0).reshape(16, 16).div(256).half()
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    masters = engine.optimizer.fp32_groups[0] if stage == 0 else engine.optimizer.single_partition_of_fp32_groups
    moved = torch.cat([master.detach().flatten() for master in masters]) - start.flatten()
    engine.destroy()
    return float(engine.get_global_grad_norm()), float(moved.norm())


deepspeed.init_distributed("gloo")
for stage in (0, 1):
    norm, moved = first_step(stage)
    print(f"stage {stage}: gradient norm {norm:.5f}, the weights move by {moved:.5f}")
