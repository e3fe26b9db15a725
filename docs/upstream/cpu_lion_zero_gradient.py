"""Show that DeepSpeed's CPU Lion moves weights whose gradient is zero (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 cpu_lion_zero_gradient.py
"""

import deepspeed
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(1000, 8), torch.nn.Linear(8, 8))
before = model[0].weight.detach().clone()
engine, *_ = deepspeed.initialize(
    model=model,
    config={
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
)
for _ in range(10):
    engine.backward(engine(torch.arange(20)).square().mean())  # the other 980 tokens do not occur
    engine.step()
moved = (model[0].weight.detach() - before).abs().amax(1)
num_moved = int((moved[20:] > 0).sum())
print(f"{num_moved} of 980 rows that got no gradient moved, by up to {float(moved[20:].max()):.3f}")
