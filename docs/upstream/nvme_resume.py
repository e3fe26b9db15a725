"""Show that a checkpoint under NVMe offload restores neither weights nor optimizer states (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 nvme_resume.py (with libaio's headers)
"""

import tempfile

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

INPUTS = torch.arange(1024.0).reshape(1, 1024).div(1024)


def build(swap: str) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024, bias=False)  # DeepSpeed swaps nothing below 1 MiB
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": swap}}
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": zero}
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=0.01, eps=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def step(engine: deepspeed.DeepSpeedEngine) -> float:
    loss = engine(INPUTS).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


deepspeed.init_distributed("gloo")
with tempfile.TemporaryDirectory() as place:
    engine = build(f"{place}/one")
    losses = [step(engine) for _ in range(2)]
    engine.save_checkpoint(f"{place}/saved")
    print("not interrupted", *(f"{loss:.6f}" for loss in losses + [step(engine) for _ in range(3)]))
    engine.destroy()
    engine = build(f"{place}/two")
    engine.load_checkpoint(f"{place}/saved")
    print("resumed after 2", *(f"{loss:.6f}" for loss in losses + [step(engine) for _ in range(3)]))
