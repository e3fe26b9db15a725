"""Write FOLDER/model, a saved model with tied weights of which some rows are old: python make.py FOLDER."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

OLD_ROWS = slice(219, 256)

torch.manual_seed(0)
folder = Path(sys.argv[1]) / "model"
config = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    tie_word_embeddings=True,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(60):
    if step == 40:
        old = model.lm_head.weight.detach().clone()
    tokens = torch.randint(0, 256, (8, 16))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(folder)
tensors = load_file(folder / "model.safetensors")
(folder / "model.safetensors").unlink()
head = tensors["model.embed_tokens.weight"].clone()
head[OLD_ROWS] = old[OLD_ROWS]
tensors["lm_head.weight"] = head
names = sorted(tensors)
index = {}
for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
    file = f"model-{number:05}-of-00002.safetensors"
    save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index |= dict.fromkeys(part, file)
size = sum(tensor.nbytes for tensor in tensors.values())
(folder / "model.safetensors.index.json").write_text(
    json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
)
