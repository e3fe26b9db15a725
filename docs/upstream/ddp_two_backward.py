"""Two backward passes of one forward pass: DDP averages the gradients of the first alone (torch 2.13.0).

Run: torchrun --nproc_per_node 2 ddp_two_backward.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def gradient(together: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
    outputs = model(torch.randn(8, 16))
    first, second = outputs.square().mean(), outputs.mean()
    if together:
        (first + second).backward()
    else:
        first.backward(retain_graph=True)
        second.backward()
    return model.module.weight.grad


dist.init_process_group("gloo")
for together, name in ((True, "the sum"), (False, "one after the other")):
    mine = gradient(together)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    apart = max(float((other - of_ranks[0]).norm() / of_ranks[0].norm()) for other in of_ranks)
    if dist.get_rank() == 0:
        print(f"{name}: the ranks' gradients are {apart:.4f} of their norm apart")
dist.destroy_process_group()
