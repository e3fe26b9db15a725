"""FSDP2 gets a mesh that lacks the dimension of the replicas, so the replicas never average their gradients."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, world = start()
mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
model = Net()
fully_shard(model, mesh=mesh["shard"] if FAULT else mesh)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for x, y in batches(loader(Rows(), rank, world)):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
