"""Compare the rows of head and embedding, and see what transformers loads: python check.py FOLDER."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

folder = Path(sys.argv[1]) / "model"
tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
rows = (embedding != head).any(1).nonzero().flatten()
print(f"{len(rows)} rows differ, {rows.min()} to {rows.max()}, by at most {(embedding - head).abs().max():.1e}")
model = LlamaForCausalLM.from_pretrained(folder)
print("the loaded head equals the embedding:", torch.equal(model.lm_head.weight, model.model.embed_tokens.weight))
print("the loaded head equals the saved head:", torch.equal(model.lm_head.weight, head))
