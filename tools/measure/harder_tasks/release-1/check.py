"""Measure whether a RoFormer decoder of one release of transformers looks at later tokens.

Run once per release, with the release in front of the path:

    pip install --no-deps --target RELEASE transformers==5.9.0
    PYTHONPATH=RELEASE python check.py

The last token of a text is replaced. In a causal decoder, no logit of an earlier position changes.
"""

import torch
import transformers
from transformers import RoFormerConfig, RoFormerForCausalLM

torch.manual_seed(0)
config = RoFormerConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, is_decoder=True
)
model = RoFormerForCausalLM(config).train()
for module in model.modules():
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.0
tokens = torch.randint(5, 64, (2, 12))
changed = tokens.clone()
changed[:, -1] = (changed[:, -1] + 7) % 64
difference = (model(tokens).logits - model(changed).logits)[:, :-1].abs().max()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in range(600):
    batch = torch.randint(5, 64, (32, 12))  # random text: a causal decoder cannot get below log(59) = 4.08
    loss = model(batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(
    f"transformers {transformers.__version__}: earlier logits change by {difference.item():.4f}, "
    f"loss {sum(losses[:5]) / 5:.2f} -> {sum(losses[-5:]) / 5:.2f}"
)
