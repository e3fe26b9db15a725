"""Show that DeepSpeedCPULion moves weights whose gradients are zero (DeepSpeed 0.19.8).

Run: DS_ACCELERATOR=cpu python cpu_lion.py
"""

import torch
from deepspeed.ops.lion import DeepSpeedCPULion

table = torch.nn.Embedding(4, 2)
torch.nn.init.zeros_(table.weight)
optimizer = DeepSpeedCPULion(table.parameters(), lr=0.01, weight_decay=0.0)
for _ in range(10):
    optimizer.zero_grad(set_to_none=False)
    table(torch.tensor([0])).sum().backward()  # the gradients of rows 1 to 3 are zero
    optimizer.step()
for row, weights in enumerate(table.weight.tolist()):
    print(f"row {row}, which is {'used' if row == 0 else 'never used'}:", *(f"{weight:.2f}" for weight in weights))
