"""Two gloo processes, DDP under accelerate with bf16: bytes per parameter at optimizer.step().

    torchrun --nproc-per-node 2 check.py

Counts parameters, gradients and AdamW states tensor by tensor. DDP's buckets are no tensors in Python, so the script
measures them as the difference of resident memory between gradient_as_bucket_view=False (the default) and True.
"""

import gc
import os

import psutil
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn

N_LAYERS, WIDTH = 8, 2048


def step(view: bool) -> tuple[float, float, set[str]]:
    gc.collect()
    before = psutil.Process().memory_info().rss
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=view)]
    )
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(N_LAYERS)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    x = torch.randn(4, WIDTH)
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(x).float().pow(2).mean())
        optimizer.step()
    tensors = [*model.parameters(), *[p.grad for p in model.parameters()]]
    tensors += [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    count = sum(p.numel() for p in model.parameters())
    gc.collect()
    after = psutil.Process().memory_info().rss
    named = sum(t.numel() * t.element_size() for t in tensors) / count
    return named, (after - before) / count, {str(t.dtype) for t in tensors}


if __name__ == "__main__":
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    kind = os.environ.get("VIEW") == "1"
    named, resident, dtypes = step(kind)
    if os.environ["RANK"] == "0":
        print(f"gradient_as_bucket_view={kind}: tensors {named:.2f}, resident {resident:.2f} bytes/parameter, {dtypes}")
