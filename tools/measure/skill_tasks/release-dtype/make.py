"""python make.py FOLDER: write the small Llama checkpoint in bfloat16 that train.py is compared with."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
