"""Show that ZeRO in fp16 uses half of the gradient in each step in which the loss scale grows (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 fp16_growing_scale.py
"""

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

get_accelerator().is_fp16_supported = lambda: True  # some CPUs compute fp16 too slowly for DeepSpeed
RATE = 0.1
INPUTS = torch.arange(256.0).reshape(16, 16).div(256)


def master(engine: deepspeed.DeepSpeedEngine, stage: int) -> torch.Tensor:
    name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    return getattr(engine.optimizer, name)[0].detach().clone()[:256]


def shares(stage: int) -> list[str]:
    """Return by how much each step of SGD moves the weights, relative to the step of plain PyTorch in fp32."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    moved = []
    for _ in range(7):
        before = master(engine, stage)
        weight = before.clone().requires_grad_()
        (INPUTS @ weight.reshape(16, 16).T).square().mean().backward()
        engine.backward(engine(INPUTS.half()).float().square().mean())
        engine.step()
        length = float((before - master(engine, stage)) @ weight.grad / weight.grad.square().sum() / RATE)
        moved.append(f"{length:.2f}")
    engine.destroy()
    return moved


deepspeed.init_distributed("gloo")
for stage in (1, 2, 3):
    print(f"stage {stage}: the steps use", *shares(stage), "of the gradient")
