"""The step that each file of the checkpoint is from."""

from pathlib import Path

import torch

folder = Path(__file__).parent / "checkpoint"
optimizer = torch.load(folder / "optimizer.bin", weights_only=False)
scheduler = torch.load(folder / "scheduler.bin", weights_only=False)
random_state = torch.load(folder / "random_states_0.pkl", weights_only=False)
print("optimizer.bin: steps", {int(state["step"]) for state in optimizer["state"].values()})
print("optimizer.bin: rate", optimizer["param_groups"][0]["lr"], "scheduler.bin: rate", scheduler["_last_lr"][0])
print(
    "scheduler.bin: calls",
    scheduler["last_epoch"],
    "(two per optimizer step); random_states_0.pkl: step",
    random_state["step"],
)
