"""Three steps of DeepSpeed's "Adam" with and without adam_w_mode, compared with torch.optim.Adam and AdamW.

In float32, in one CPU process. torch_adam is set because DeepSpeed's fused kernels need a GPU; DeepSpeed reads the same
flag for both (engine.py, ADAM_W_MODE).
"""

import os
import sys

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29671")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.comm.torch
import torch
from torch import nn

# The attribute deepspeed.comm.torch is torch itself, so the module is taken by its name.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # gloo alone is enough, so nothing has to be compiled

HYPER = {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(16, 16)


def loss(module: nn.Module) -> torch.Tensor:
    return module(torch.ones(4, 16)).pow(2).mean()


for extra in ({}, {"adam_w_mode": False}):
    module = model()
    optimizer = {"type": "Adam", "params": {**HYPER, "torch_adam": True, **extra}}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "optimizer": optimizer}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    for _ in range(3):
        engine.backward(loss(engine))
        engine.step()
    for reference in (torch.optim.Adam, torch.optim.AdamW):
        plain = model()
        steps = reference(plain.parameters(), **HYPER)
        for _ in range(3):
            steps.zero_grad()
            loss(plain).backward()
            steps.step()
        difference = (plain.weight - module.weight).abs().max().item()
        print(f"{extra or 'as in ds.json'}: differs from torch.optim.{reference.__name__} by {difference:.1e}")
