"""Show that ZeRO-3 loses gradients of a module that is used twice under reentrant checkpointing (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 zero3_reentrant.py
"""

import deepspeed
import torch
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.block = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.block, hidden, use_reentrant=self.use_reentrant)
        return hidden


def step(use_reentrant: bool, bucket_size: int) -> str:
    torch.manual_seed(0)
    model = Model(use_reentrant)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": bucket_size,
                "stage3_param_persistence_threshold": 0,
            },
        },
    )
    try:
        engine.backward(engine(torch.arange(256.0).reshape(16, 16).div(256)).square().mean())
        engine.step()
    except AssertionError as error:
        return f"AssertionError: {str(error) or 'no message'}"
    return f"gradient norm {float(engine.get_global_grad_norm()):.4f}"


deepspeed.init_distributed("gloo")
for use_reentrant in (False, True):
    for bucket_size in (100_000, 100):
        kind = "reentrant" if use_reentrant else "not reentrant"
        print(f"{kind}, buckets of {bucket_size} elements: {step(use_reentrant, bucket_size)}")
