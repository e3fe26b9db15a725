"""The weights are bfloat16 without copies in float32, so that small updates are rounded away.

`ddp` averages the gradients with DDP. `fsdp2` has a policy for mixed precision, but the weights it shards are bfloat16.
"""

import sys

import torch
from common import FAULT, Decoder, Texts, batches, finish, loader, record, start
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = Decoder()
if FAULT:
    model = model.to(torch.bfloat16)
if sys.argv[1] == "fsdp2":
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    wrapped = model
else:
    wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
for ids, labels in batches(loader(Texts(), rank, world)):
    with torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[1] == "ddp"):
        outputs = wrapped(ids)
    loss = torch.nn.functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
