"""A program for `accelerate launch`: save a checkpoint in the folder named first, or load the one that is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from study.engines import extensions

folder = Path(sys.argv[1])
extensions.use_own_folder()
os.environ["DS_ACCELERATOR"] = "cpu"
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
model = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
status = 0
if folder.exists():
    try:
        accelerator.load_state(str(folder))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        status = 1
else:
    accelerator.backward(model(torch.ones(1, 64, device=accelerator.device)).sum())
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)  # as train.py does: a gloo thread may abort the interpreter that finalises (pytorch #190489)
