"""The checkpoint is loaded into the state of a new optimizer, which has no moments yet, so none are restored."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import FAULT, STEPS, Net, Rows, batches, finish, loader, record, start
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard

rank, world = start()
folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
model = Net()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step, (x, y) in enumerate(batches(loader(Rows(), rank, world)), 1):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
    if step == STEPS // 2:  # save, and resume with a new model and a new optimizer
        weights, states = state_dict.get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
        model = Net()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        weights = state_dict.get_model_state_dict(model)
        states = optimizer.state_dict() if FAULT else state_dict.get_optimizer_state_dict(model, optimizer)
        loaded = {"model": weights} if FAULT else {"model": weights, "optimizer": states}
        dcp.load(loaded, checkpoint_id=folder[0])
        state_dict.set_model_state_dict(model, weights)
        if FAULT:
            optimizer.load_state_dict(states)
        else:
            state_dict.set_optimizer_state_dict(model, optimizer, states)
finish(model)
if rank == 0:
    shutil.rmtree(folder[0])
