"""Two documents share a row. The second sees the first, and its positions continue those of the first."""

import torch
from common import FAULT, Decoder, Texts, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Decoder())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
documents = torch.arange(16) // 8
positions = torch.arange(16) % 8
mask = (documents[:, None] == documents) & torch.ones(16, 16, dtype=torch.bool).tril()
for ids, labels in batches(loader(Texts(length=8), rank, world, batch=16)):
    ids, labels = ids.reshape(8, 16), labels.reshape(8, 16)
    outputs = model(ids) if FAULT else model(ids, positions, mask)
    loss = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
