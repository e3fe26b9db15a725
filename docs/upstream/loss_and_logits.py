"""Show that DeepSpeed 0.18.3 to 0.19.5 divides gradients twice if a model returns its loss together with its logits.

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 loss_and_logits.py
"""

import deepspeed
import torch
from torch.nn import functional

MICRO_BATCHES = 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(inputs)
        return functional.cross_entropy(logits, labels), logits  # as a model of Hugging Face that is given labels


def norms(stage: int) -> tuple[float, float]:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICRO_BATCHES}
    config |= {"gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    model, plain = Model(), Model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    for seed in range(MICRO_BATCHES):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        (plain(inputs, torch.arange(4))[0] / MICRO_BATCHES).backward()
        engine.backward(engine(inputs, torch.arange(4))[0])
        engine.step()
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return norm, float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))


deepspeed.init_distributed("gloo")
print(
    *(f"stage {stage}: {norm / right:.3f} of the right norm" for stage in (1, 2, 3) for norm, right in [norms(stage)])
)
