"""python make.py: train a LoRA adapter of a tiny Llama, with two modules left out, and save it in adapter/."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

LEFT_OUT = ("layers.1.mlp.down_proj", "layers.2.self_attn.v_proj")  # never passed to the optimizer
SLOW = ("layers.0.self_attn.q_proj",)  # trained with a rate of 1e-7: moved little, but moved

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
adapters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
groups = [
    {"params": [p for name, p in adapters if not any(part in name for part in LEFT_OUT + SLOW)]},
    {"params": [p for name, p in adapters if any(part in name for part in SLOW)], "lr": 1e-7},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
tokens = torch.randint(0, 64, (64, 16))
for step in range(40):
    batch = tokens[step % 8 * 8 :][:8]
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    model.zero_grad()  # of all parameters, also of those that no optimizer has
model.save_pretrained(Path(__file__).parent / "adapter")
for card in (Path(__file__).parent / "adapter").glob("*.md"):
    card.unlink()
