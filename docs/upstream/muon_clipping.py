"""Show that gradient clipping shortens Muon's orthogonalized update (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 muon_clipping.py
"""

import deepspeed
import torch

INPUTS = torch.arange(256.0).reshape(16, 16).div(256)


def first_step(stage: int, clipping: dict[str, float]) -> tuple[float, float]:
    """Return the reported gradient norm, and how far the weights move."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Muon", "params": {"lr": 0.01, "weight_decay": 0.0}},
            **clipping,
        },
    )
    start = model[0].weight.detach().clone()
    engine.backward(engine(INPUTS).square().mean())
    engine.step()
    norm, moved = float(engine.get_global_grad_norm()), float((model[0].weight - start).norm())
    engine.destroy()
    return norm, moved


deepspeed.init_distributed("gloo")
for stage in (1, 2):
    for clipping in ({"gradient_clipping": 1000.0}, {}, {"gradient_clipping": 0.1}):
        norm, moved = first_step(stage, clipping)
        text = f"gradient_clipping {clipping['gradient_clipping']:g}" if clipping else "no gradient_clipping"
        print(f"stage {stage}, {text}: gradient norm {norm:.4f}, the weights move by {moved:.4f}")
