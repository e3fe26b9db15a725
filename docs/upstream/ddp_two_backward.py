"""Show that DDP does not average the gradients of a second backward pass of one forward pass (PyTorch 2.13.0).

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
for together, name in ((True, "one backward pass"), (False, "two backward passes")):
    mine = gradient(together)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    difference = max(float((other - of_ranks[0]).norm() / of_ranks[0].norm()) for other in of_ranks)
    if dist.get_rank() == 0:
        print(f"{name}: the ranks' gradients differ by {difference:.4f} of their norm")
dist.destroy_process_group()
