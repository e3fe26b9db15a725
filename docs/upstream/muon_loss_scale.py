"""Show that Muon's momentum under ZeRO-1 and ZeRO-2 has the loss scale in it (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 muon_loss_scale.py
"""

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

get_accelerator().is_fp16_supported = lambda: True  # some CPUs compute fp16 too slowly for DeepSpeed
INPUTS = torch.arange(256.0).reshape(16, 16).div(256)


def momentum(stage: int, power: int, overflow: bool) -> torch.Tensor:
    """Return Muon's momentum after two steps, divided by the current loss scale."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "fp16": {"enabled": True, "initial_scale_power": power, "hysteresis": 1},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Muon", "params": {"lr": 0.0, "momentum": 0.9, "weight_decay": 0.0}},
        },
    )
    for factor in (1.0, 1e30, 1.0) if overflow else (1.0, 1.0):  # a step that overflows is skipped
        engine.backward(engine(INPUTS.half()).float().square().mean() * factor)
        engine.step()
    buffers = [state["momentum_buffer"] for state in optimizer.optimizer.state.values() if "momentum_buffer" in state]
    engine.destroy()
    return torch.cat([buffer.flatten() for buffer in buffers]).float() / optimizer.loss_scale


deepspeed.init_distributed("gloo")
for stage in (1, 2):
    right, changed = momentum(stage, 8, overflow=False), momentum(stage, 8, overflow=True)
    ratio = float(changed.norm() / right.norm())
    print(f"stage {stage}: after the loss scale is halved, the momentum is {ratio:.3f} times the right one")
