"""Compare the parts of the ranks with the model's own weights in the same folder: python check.py FOLDER."""

import sys
from pathlib import Path

import deepspeed  # noqa: F401 (the files contain its classes)
import torch

folder = Path(sys.argv[1]) / "checkpoint"
(step,) = (path for path in folder.iterdir() if path.is_dir())
model = torch.load(step / "mp_rank_00_model_states.pt", weights_only=False)["module"]
parts = [
    torch.load(file, weights_only=False)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    for file in sorted(step.glob("*zero_pp_rank_*_optim_states.pt"))
]
flat = torch.cat(parts)
position = 0
for name, weight in model.items():
    part = flat[position : position + weight.numel()]
    wrong = (part != weight.flatten()).sum().item()
    position += weight.numel()
    print(f"{name}: {wrong} of {weight.numel()} values differ", "<--" if wrong else "")
print(
    [
        (name, value)
        for file in sorted(step.glob("*optim*"))
        for name, value in torch.load(file, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"][
            "state"
        ][0].items()
        if name == "step"
    ]
)
