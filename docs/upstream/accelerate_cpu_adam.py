"""Show that accelerate replaces DeepSpeedCPUAdam by one that adds weight decay to the gradient (accelerate 1.15.0).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 accelerate_cpu_adam.py
"""

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from deepspeed.ops.adam import DeepSpeedCPUAdam

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def first_step(through_accelerate: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16, bias=False)
    start = model.weight.detach().clone()
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=0.01, weight_decay=0.1)  # adamw_mode is True by default
    if through_accelerate:
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG, zero3_init_flag=False),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        )
        engine, _ = accelerator.prepare(model, optimizer)
        accelerator.backward(0 * engine(torch.ones(1, 16)).sum())  # only weight decay changes the weights
    else:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
        engine.backward(0 * engine(torch.ones(1, 16)).sum())
        engine.step()
    decay = 1 - float(model.weight.norm() / start.norm())
    print(f"{'with' if through_accelerate else 'without'} accelerate: the weights shrink by {100 * decay:.2f} %")


deepspeed.init_distributed("gloo")
for through_accelerate in (False, True):
    first_step(through_accelerate)
