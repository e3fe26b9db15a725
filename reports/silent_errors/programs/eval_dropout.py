"""Dropout stays on in evaluation mode, because the layer passes its rate on without looking at the mode."""

import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, record_evaluation, start
from torch.nn.parallel import DistributedDataParallel


class Dropping(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.fc1(x)))
        return self.head(torch.nn.functional.dropout(hidden, 0.3, training=self.training or FAULT))


rank, world = start()
model = Dropping()
model.fc2 = None
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = Rows()
torch.manual_seed(5 + rank)
for step, (x, y) in enumerate(batches(loader(data, rank, world)), 1):
    loss = torch.nn.functional.cross_entropy(wrapped(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
    if step % 8 == 0:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng():
            record_evaluation(torch.nn.functional.cross_entropy(model(data.x[:128]), data.y[:128]))
        model.train()
finish(model)
