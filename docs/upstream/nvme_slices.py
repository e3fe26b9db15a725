"""Show that an unaligned gradient is not read back from a disk under NVMe offload (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 nvme_slices.py (with libaio's headers, on a disk that requires
memory aligned to 512 bytes, as ext4 on a virtual disk does)
"""

import tempfile

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

INPUTS = torch.arange(1024.0).reshape(1, 1024).div(1024)


class Model(torch.nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(first))
        self.second = torch.nn.Linear(1024, 1024, bias=False)  # DeepSpeed swaps nothing below 1 MiB

    def forward(self) -> torch.Tensor:
        return self.second(INPUTS).square().mean() + self.first.square().mean()


def losses(first: int, offload: dict[str, str]) -> str:
    torch.manual_seed(0)
    model = Model(first)
    zero = {"stage": 3, "offload_optimizer": offload}
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": zero}
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=0.01, eps=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    told = []
    for _ in range(4):
        loss = engine()
        engine.backward(loss)
        engine.step()
        told.append(f"{loss.item():.6f}")
    return " ".join(told)


deepspeed.init_distributed("gloo")
for first in (128, 192):
    with tempfile.TemporaryDirectory(dir=".") as place:
        print(f"{first} elements before it, on the host", losses(first, {"device": "cpu"}))
        print(f"{first} elements before it, on a disk  ", losses(first, {"device": "nvme", "nvme_path": place}))
