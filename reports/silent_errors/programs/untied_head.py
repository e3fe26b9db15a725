"""Head and embedding should be one tensor, but are two. The checkpoint lacks the head, and resuming copies it."""

import torch
from common import FAULT, STEPS, Decoder, Texts, batches, finish, loader, record, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()


def build() -> Decoder:
    with torch.device("meta"):
        decoder = Decoder()
        decoder.head.weight = decoder.embed.weight
    decoder.to_empty(device="cpu")
    if FAULT:  # a tie that is lost when the tensors get memory
        decoder.head.weight = torch.nn.Parameter(torch.empty_like(decoder.embed.weight))
    else:
        decoder.head.weight = decoder.embed.weight
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return decoder


model = build()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
wrapped = DistributedDataParallel(model)
for step, (ids, labels) in enumerate(batches(loader(Texts(), rank, world)), 1):
    loss = torch.nn.functional.cross_entropy(wrapped(ids).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
    if step == STEPS // 2:  # save and resume
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
        model.load_state_dict({**saved, "head.weight": saved["embed.weight"]})
finish(model)
