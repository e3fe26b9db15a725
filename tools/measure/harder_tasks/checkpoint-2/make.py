"""Write FOLDER/checkpoint of ZeRO-2, of which a part of rank 1's weights is old.

python -m torch.distributed.run --standalone --nproc-per-node 2 make.py FOLDER
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from torch import nn

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # gloo alone is enough, so nothing has to be compiled
OLD, LAST = 20, 30

folder = Path(sys.argv[1]) / "checkpoint"
deepspeed.init_distributed("gloo")
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


model = nn.Sequential()
model.add_module("embed", nn.Linear(12, 24))
for number in range(3):
    model.add_module(f"block{number}", Block(24))
model.add_module("head", nn.Linear(24, 5))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
torch.manual_seed(1 + dist.get_rank())
for step in range(1, LAST + 1):
    engine.backward(engine(torch.randn(8, 12)).pow(2).mean())
    engine.step()
    if step == OLD:
        old = [part.detach().clone() for part in engine.optimizer.single_partition_of_fp32_groups]
engine.save_checkpoint(str(folder))
dist.barrier()
if dist.get_rank() == 1:
    (file,) = (folder / f"global_step{LAST}").glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    content = torch.load(file, weights_only=False)
    saved = content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    middle = saved.numel() // 2
    saved.data[middle:] = old[0][middle : saved.numel()]
    torch.save(content, file)
dist.barrier()
dist.destroy_process_group()
