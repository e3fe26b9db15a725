"""The Trainer's first SGD step on two gloo processes with 100 and 20 labels that are not -100.

    PYTHONPATH=FOLDER_WITH_THE_RELEASE torchrun --nproc-per-node 2 check.py

Prints how the weights move, as a combination of the gradients of the two processes' sums over tokens: the weight of a
token of process 1 relative to a token of process 0.
"""

import os
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

RATE = 1.0
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).double()
plain = LlamaForCausalLM(config).double()
plain.load_state_dict(model.state_dict())
before = [p.detach().clone() for p in model.parameters()]
rows = torch.randint(0, 32, (2, 100))  # one row per process
labels = rows.clone()
labels[1, 20:] = -100
data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
sums = []
for row, label in zip(rows, labels, strict=True):
    plain.zero_grad()
    logits = plain(input_ids=row[None]).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, label[1:], reduction="sum").backward()
    sums.append(torch.cat([p.grad.flatten() for p in plain.parameters()]))
args = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=1, max_steps=1, learning_rate=RATE, max_grad_norm=0.0, use_cpu=True,
    report_to=[], save_strategy="no", lr_scheduler_type="constant", disable_tqdm=True, seed=0,
    **({"average_tokens_across_devices": False} if os.environ.get("KEEP_OLD") else {}),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
trainer = Trainer(model=model, args=args, train_dataset=data, optimizers=(optimizer, None))
trainer.train()
moved = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)])
solution = torch.linalg.lstsq(torch.stack(sums, 1), moved[:, None])
first, second = solution.solution.flatten().tolist()
if os.environ["RANK"] == "0":
    print(
        f"transformers {transformers.__version__}: token weights {first:.5f}, {second:.5f}, ratio {second / first:.3f}"
    )
