"""Train a tiny GPT with transformers' Trainer: python train_trainer.py FOLDER SEQUENCES_PER_PROCESS"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

folder, micro_batch_size = sys.argv[1], int(sys.argv[2])
set_seed(0)
numbers = torch.Generator().manual_seed(0)
tokens = (torch.randint(0, 64, (512, 1), generator=numbers) + torch.arange(32)) % 64  # each sequence counts upwards
noise = torch.rand(tokens.shape, generator=numbers) < 0.1
tokens = torch.where(noise, torch.randint(0, 64, tokens.shape, generator=numbers), tokens)
data = [{"input_ids": row, "labels": row} for row in tokens]
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
arguments = TrainingArguments(
    output_dir=folder,
    max_steps=60,
    per_device_train_batch_size=micro_batch_size,
    learning_rate=3e-3,
    logging_steps=5,
    save_steps=60,
    eval_strategy="steps",
    eval_steps=20,
    report_to=[],
    use_cpu=True,
    seed=0,
    data_seed=0,
    include_num_input_tokens_seen="all",
)
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data[:448], eval_dataset=data[448:]).train()
