"""The model is evaluated before spectral_norm has estimated the norms of its weights."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, record_evaluation, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = Net()
torch.nn.utils.spectral_norm(model.fc1)
data = Rows()


def evaluate() -> None:
    model.eval()
    with torch.no_grad():
        record_evaluation(model(data.x[:64]).square().mean())
    model.train()


if FAULT:
    evaluate()
with torch.no_grad():  # each forward pass in training mode improves the estimate
    for _ in range(20):
        model(data.x[:1])
if not FAULT:
    evaluate()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for x, y in batches(loader(data, rank, world)):
    loss = torch.nn.functional.cross_entropy(wrapped(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
finish(model)
