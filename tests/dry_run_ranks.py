"""A script in which one rank, or one kind of rank, does something else than the others, as its argument says."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

WHICH = sys.argv[1]
if WHICH == "does nothing":
    sys.exit()
if WHICH == "leaves with 3":
    os._exit(3)

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
if WHICH == "a middle rank" and rank != 3:
    dist.all_reduce(values)
elif WHICH == "other operations":
    dist.all_reduce(values, dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)
elif WHICH == "other sources":
    dist.broadcast(values, 0 if rank == 0 else 1)
elif WHICH == "a receive":
    if rank == 0:
        dist.recv(values, 1)
elif WHICH == "an object":
    dist.broadcast_object_list([rank])
elif WHICH == "few batches":  # as in meta-pytorch/torchrec#189
    for _ in range({4: 3, 6: 2}.get(rank, 5)):
        dist.all_to_all_single(torch.empty(world_size), torch.ones(world_size))
elif WHICH == "a skipped step":  # as in dylanyunlon/Neuron_SP#154
    gradient = torch.full((world_size,), 100.0 if rank == 5 else 1.0)
    if gradient.norm() < 50:
        dist.reduce_scatter_tensor(torch.empty(1), gradient)
elif WHICH == "a ring":  # sound
    following, preceding = (rank + 1) % world_size, (rank - 1) % world_size
    pair = [dist.P2POp(dist.isend, values, following), dist.P2POp(dist.irecv, torch.empty(4), preceding)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    if rank % 2 == 0:
        dist.send(values, following, tag=1)
    else:
        dist.recv(values, preceding, tag=1)
    dist.broadcast(values, world_size - 1)
    dist.reduce(values, 0)
