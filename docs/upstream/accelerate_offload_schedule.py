"""Show that the learning rate stays the same after load_state with CPU offload (accelerate 1.15.0).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 accelerate_offload_schedule.py
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

NUM_STEPS = 6


def prepared(offload: bool):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu" if offload else "none"}}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": zero}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / NUM_STEPS)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def rates(offload: bool, save_after: int | None = None) -> list[str]:
    """Return the learning rate of each step; the training is saved and resumed after `save_after` steps."""
    accelerator, model, optimizer, schedule = prepared(offload)
    used = []
    for step in range(NUM_STEPS):
        if step == save_after:
            with tempfile.TemporaryDirectory() as folder:
                accelerator.save_state(folder)
                reset(accelerator)  # as in a new process
                accelerator, model, optimizer, schedule = prepared(offload)
                accelerator.load_state(folder)
        used.append(f"{model.optimizer.optimizer.param_groups[0]['lr']:.3f}")
        accelerator.backward(model(torch.ones(1, 16)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    reset(accelerator)
    return used


def reset(accelerator: Accelerator) -> None:
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


for offload in (False, True):
    print("with CPU offload" if offload else "without offload")
    print("  not interrupted", *rates(offload))
    print("  resumed after 2", *rates(offload, save_after=2))
