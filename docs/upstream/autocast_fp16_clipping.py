"""Show that DeepSpeed's torch_autocast in float16 clips gradients that still have the loss scale (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 autocast_fp16_clipping.py
"""

import deepspeed
import torch

CLIPPING = 1.0  # DeepSpeed's default; the gradient norm is 3.23
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
INPUTS = torch.arange(8 * 1024.0).reshape(8, 1024).sin()


def new(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 4))
    return model, OPTIMIZERS[name](model.parameters(), lr=0.01)


def weights(model: torch.nn.Module, stage: int = 0) -> torch.Tensor:
    parameters = [*model.parameters()]
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        return torch.cat([parameter.detach().float().flatten() for parameter in parameters])


def without_deepspeed(dtype: str, name: str) -> torch.Tensor:
    """Return the weights after one step of plain PyTorch."""
    model, optimizer = new(name)
    with torch.autocast("cpu", getattr(torch, dtype)):
        outputs = model(INPUTS)
    outputs.float().square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
    optimizer.step()
    return weights(model)


def with_deepspeed(dtype: str, name: str, stage: int) -> tuple[torch.Tensor, float]:
    """Return the weights after one step, and the gradient norm that DeepSpeed reports."""
    model, optimizer = new(name)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIPPING,
        "torch_autocast": {"enabled": True, "dtype": dtype},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(engine(INPUTS).float().square().mean())
    engine.step()
    after, norm = weights(engine.module, stage), float(engine.get_global_grad_norm())
    engine.destroy()
    return after, norm


deepspeed.init_distributed("gloo")
start = weights(new("SGD")[0])
for dtype, name, stages in (("float16", "SGD", (1, 2, 3)), ("float16", "AdamW", (1, 2, 3)), ("bfloat16", "SGD", (2,))):
    right = without_deepspeed(dtype, name) - start
    for stage in stages:
        after, norm = with_deepspeed(dtype, name, stage)
        share = float((after - start) @ right / (right @ right))
        print(f"{dtype}, {name}, stage {stage}: the weights move {share:.5f} of the right distance, norm {norm:.3g}")
