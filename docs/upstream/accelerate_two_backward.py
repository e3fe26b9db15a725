"""Show that accelerate 1.15.0 takes one optimizer step per backward pass under DeepSpeed.

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 accelerate_two_backward.py
"""

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs


def steps(stage: int, together: bool) -> int:
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    plugin = DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
    )
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo])
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    outputs = model(torch.arange(256.0).reshape(16, 16).div(256))
    first, second = outputs.square().mean(), outputs.mean()
    if together:
        accelerator.backward(first + second)
    else:
        accelerator.backward(first, retain_graph=True)
        accelerator.backward(second)
    optimizer.step()
    accelerator.state._reset_state(reset_partial_state=False)
    return model.global_steps


for stage in (1, 2):
    print(f"stage {stage}: {steps(stage, True)} step(s) for one backward pass, {steps(stage, False)} for two")
