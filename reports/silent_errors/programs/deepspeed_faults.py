"""Faults of DeepSpeed 0.19.8. The right twin of each variant avoids the setting that DeepSpeed gets wrong."""

import os
import sys

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # the compilation would take longer than the training

import deepspeed
import torch
from common import FAULT, Net, Rows, batches, finish, loader, record, start
from deepspeed.accelerator import get_accelerator

get_accelerator().is_fp16_supported = lambda: True  # some CPUs compute float16 too slowly for DeepSpeed
variant = sys.argv[1]
rank, world = start()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
settings: dict = {"train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
stage = 1
if variant == "autocast_clipping":
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    dtype = "float16" if FAULT else "bfloat16"
    settings |= {"gradient_clipping": 1.0, "torch_autocast": {"enabled": True, "dtype": dtype}}
elif variant == "zero0_bf16":
    stage = 0 if FAULT else 1
    settings |= {"bf16": {"enabled": True}}
elif variant in ("zero0_fp16", "growing_scale"):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    stage = 0 if FAULT and variant == "zero0_fp16" else 1
    window = 3 if FAULT and variant == "growing_scale" else 1000
    settings |= {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": window}}
elif variant == "muon_clipping":
    settings |= {"gradient_clipping": 0.1 if FAULT else 0.0}
    settings |= {"optimizer": {"type": "Muon", "params": {"lr": 0.01, "weight_decay": 0.0}}}
settings["zero_optimization"] = {"stage": stage}
given = None if variant == "muon_clipping" else optimizer
engine, optimizer, *_ = deepspeed.initialize(
    model=model, optimizer=given, model_parameters=model.parameters(), config=settings
)
kind = next(model.parameters()).dtype
for x, y in batches(loader(Rows(), rank, world)):
    outputs = engine(x.to(kind)).float()
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
