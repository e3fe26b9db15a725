"""Train a small model under ZeRO-3, and save it as a checkpoint, without gathering (a mistake), and gathered."""

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

deepspeed.init_distributed()
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=2048, tie_word_embeddings=True))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

for _ in range(3):
    tokens = torch.randint(2048, (2, 32), device=engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()

engine.save_checkpoint("checkpoint")
if dist.get_rank() == 0:
    engine.module.save_pretrained("model")
with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    if dist.get_rank() == 0:
        engine.module.save_pretrained("gathered")
dist.barrier()
