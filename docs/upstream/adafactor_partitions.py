"""Show that Adafactor under ZeRO is another optimizer, because it is given one flat vector (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu torchrun --nproc_per_node 1 adafactor_partitions.py
"""

import deepspeed
import torch


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))


def moved(model: torch.nn.Module) -> list[torch.Tensor]:
    return [
        after.detach() - before.detach()
        for after, before in zip(model.parameters(), make_model().parameters(), strict=True)
    ]


def loss(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(1024.0).reshape(16, 64).sin()).square().mean()


def plain() -> tuple[list[torch.Tensor], int]:
    model = make_model()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    loss(model).backward()
    optimizer.step()
    return moved(model), elements(optimizer)


def under_zero(stage: int) -> tuple[list[torch.Tensor], int]:
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(loss(engine))
    engine.step()
    result = moved(model), elements(optimizer)
    engine.destroy()
    return result


def elements(optimizer: torch.optim.Optimizer) -> int:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() for value in states if value.ndim)


deepspeed.init_distributed("gloo")
right, num_states = plain()
print(f"without DeepSpeed: {num_states} elements of states")
for stage in (1, 2):
    update, num_elements = under_zero(stage)
    ratios = ", ".join(f"{float(ours.norm() / theirs.norm()):.2f}" for ours, theirs in zip(update, right, strict=True))
    print(f"stage {stage}: {num_elements} elements of states; each parameter moves {ratios} of the right distance")
