"""Faults of DeepSpeed 0.19.8. The right twin of each variant avoids the setting that DeepSpeed gets wrong."""

import sys

import deepspeed
import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from deepspeed.accelerator import get_accelerator

get_accelerator().is_fp16_supported = lambda: True  # some CPUs compute float16 too slowly for DeepSpeed
variant = sys.argv[1]
rank, world = start()
model = Net()
has_sgd = variant in ("autocast_clipping", "zero0_fp16", "growing_scale")  # AdamW hides a wrong scale
rate, kind = (0.5, torch.optim.SGD) if has_sgd else (1e-2, torch.optim.AdamW)
optimizer = kind(model.parameters(), rate)
settings: dict = {"train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
stage = 1
if variant == "autocast_clipping":
    cast = {"enabled": True, "dtype": "float16" if FAULT else "bfloat16"}
    settings |= {"gradient_clipping": 1.0, "torch_autocast": cast}
elif variant == "zero0_bf16":
    stage = 0 if FAULT else 1
    settings |= {"bf16": {"enabled": True}}
elif variant in ("zero0_fp16", "growing_scale"):
    stage = 0 if FAULT and variant == "zero0_fp16" else 1
    window = 3 if FAULT and variant == "growing_scale" else 1000
    settings |= {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": window}}
settings["zero_optimization"] = {"stage": stage}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
dtype = next(model.parameters()).dtype
for x, y in batches(loader(Rows(), rank, world)):
    outputs = engine(x.to(dtype)).float()
    loss = torch.nn.functional.cross_entropy(outputs, y)
    if variant == "two_backward":
        penalty = outputs.square().mean()
        if FAULT:
            engine.backward(loss, retain_graph=True)
            engine.backward(penalty)
        else:
            engine.backward(loss + penalty)
    else:
        engine.backward(loss)
    engine.step()
    record(loss)
finish(engine.module)
