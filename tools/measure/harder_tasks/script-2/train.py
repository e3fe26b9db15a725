"""Train a classifier of short texts with DDP: torchrun --nproc-per-node 2 train.py

Texts are padded, and a text counts as often as it has tokens. The loss of an update is the mean over all tokens of all
ranks and all micro batches of the update.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, LENGTH, WIDTH, CLASSES = 97, 24, 48, 7
MICRO_BATCH, ACCUMULATION, EPOCHS = 4, 4, 3
PADDING = 0


class Texts(Dataset):
    """208 texts of 8 to 24 tokens with a class each, padded to 24."""

    def __init__(self, rows=208):
        generator = torch.Generator().manual_seed(13)
        self.tokens = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
        lengths = torch.randint(8, LENGTH + 1, (rows,), generator=generator)
        self.tokens[torch.arange(LENGTH)[None] >= lengths[:, None]] = PADDING
        self.classes = self.tokens.sum(1) % CLASSES

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        return self.tokens[row], self.classes[row]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        padded = tokens == PADDING
        hidden = self.blocks(self.embedding(tokens), src_key_padding_mask=padded)
        hidden = hidden.masked_fill(padded[..., None], 0).sum(1) / (~padded).sum(1, keepdim=True)
        return self.head(hidden)


def windows(loader):
    """Yield the micro batches of one update at a time; the last window of an epoch may be shorter."""
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == ACCUMULATION:
            yield window
            window = []
    if window:
        yield window


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP sends the weights of rank 0 to the other ranks
    model = DistributedDataParallel(Classifier())
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    texts = Texts()
    sampler = DistributedSampler(texts, shuffle=True, seed=5)
    loader = DataLoader(texts, batch_size=MICRO_BATCH, sampler=sampler)
    updates = EPOCHS * -(-len(loader) // ACCUMULATION)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / updates)

    update = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for window in windows(loader):
            count = torch.tensor(float(sum((tokens != PADDING).sum() for tokens, _ in window)))
            dist.all_reduce(count)
            count /= world  # DDP divides the sum of the gradients by the number of ranks
            total = torch.zeros(())
            for index, (tokens, classes) in enumerate(window):
                last = index == len(window) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    losses = nn.functional.cross_entropy(model(tokens), classes, reduction="none")
                    loss = (losses * (tokens != PADDING).sum(1)).sum() / count
                    loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            dist.all_reduce(total)
            update += 1
            if rank == 0:
                print(f"update {update} of {updates}, epoch {epoch}, loss {total.item() / world:.4f}", flush=True)
    if rank == 0 and "SAVE" in os.environ:
        torch.save(model.module.state_dict(), os.environ["SAVE"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
