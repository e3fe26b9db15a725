"""Show that ZeRO-2 does not train biases under Muon in bf16 with gradients accumulated in fp32 (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 muon_biases.py
"""

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

INPUTS = torch.arange(256.0).reshape(16, 16).div(256).bfloat16()


def moved(stage: int, in_fp32: bool) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32" if in_fp32 else "bf16"},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Muon", "params": {"lr": 0.01, "weight_decay": 0.0}},
        },
    )
    start = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in model.named_parameters()}
    engine.backward(engine(INPUTS).float().square().mean())
    engine.step()
    distances = {
        name: float((safe_get_full_fp32_param(parameter) - start[name]).norm())
        for name, parameter in model.named_parameters()
    }
    engine.destroy()
    return ", ".join(f"{name} {distance:.4f}" for name, distance in distances.items())


deepspeed.init_distributed("gloo")
for stage, in_fp32 in ((1, True), (2, False), (2, True)):
    print(f"stage {stage}, accumulated in {'fp32' if in_fp32 else 'bf16'}: {moved(stage, in_fp32)}")
