"""Show that ZeRO-1 and ZeRO-2 keep only the gradients of the last of two backward passes (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 two_backward.py
"""

import deepspeed
import torch


def norm(stage: int, together: bool) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
        },
    )
    outputs = engine(torch.arange(256.0).reshape(16, 16).div(256))
    first, second = outputs.square().mean(), outputs.mean()
    if together:
        engine.backward(first + second)
    else:
        engine.backward(first, retain_graph=True)
        engine.backward(second)
    engine.step()
    grad_norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return grad_norm


deepspeed.init_distributed("gloo")
for stage in (1, 2):
    whole, last = norm(stage, True), norm(stage, False)
    print(f"stage {stage}: gradient norm {whole:.4f} after one backward pass, {last:.4f} after two")
