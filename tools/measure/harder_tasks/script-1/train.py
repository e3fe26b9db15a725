"""Pretrain a small decoder on text with DDP: torchrun --nproc-per-node 2 train.py

Micro batches have different numbers of tokens that count, because texts are padded. The loss of an update is the mean
over all tokens of all ranks and all micro batches of the update.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, LENGTH, WIDTH = 97, 24, 48
MICRO_BATCH, ACCUMULATION, EPOCHS = 4, 4, 3
PADDING = 0


class Texts(Dataset):
    """208 texts of 8 to 24 tokens, padded to 24."""

    def __init__(self, rows=208):
        generator = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
        lengths = torch.randint(8, LENGTH + 1, (rows,), generator=generator)
        self.tokens[torch.arange(LENGTH)[None] >= lengths[:, None]] = PADDING

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        return self.tokens[row]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


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
    torch.manual_seed(0)  # the same weights on every rank
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    texts = Texts()
    sampler = DistributedSampler(texts, world, rank, shuffle=True, seed=5)
    loader = DataLoader(texts, batch_size=MICRO_BATCH, sampler=sampler)
    updates = EPOCHS * -(-len(loader) // ACCUMULATION)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / updates)

    update = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for window in windows(loader):
            count = torch.tensor(float(sum((batch[:, 1:] != PADDING).sum() for batch in window)))
            dist.all_reduce(count)  # the tokens of this update on all ranks
            total = torch.zeros(())
            for index, batch in enumerate(window):
                model.require_backward_grad_sync = index == ACCUMULATION - 1
                logits = model(batch[:, :-1])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PADDING, reduction="sum"
                )
                (loss * world / count).backward()  # DDP divides by the number of ranks
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            update += 1
            if rank == 0:
                print(f"update {update} of {updates}, epoch {epoch}, loss {(total / count).item():.4f}", flush=True)
    if rank == 0 and "SAVE" in os.environ:
        torch.save(model.module.state_dict(), os.environ["SAVE"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
