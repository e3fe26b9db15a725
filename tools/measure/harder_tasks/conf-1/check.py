"""Train a small Llama with Trainer and ds.json in one CPU process, and print the learning rates and weight decays."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(
    RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29731", DS_ACCELERATOR="cpu"
)

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

# The attribute deepspeed.comm.torch is torch itself, so the module is taken by its name.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # gloo alone is enough, so nothing has to be compiled
LAST = 120
RATES = {}


class Record(TrainerCallback):
    """Record the learning rate with which each update is made, and the weight decay of the norms."""

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
        groups = trainer.model_wrapped.optimizer.param_groups
        RATES[state.global_step + 1] = groups[0]["lr"]
        if state.global_step == 0:
            names = {parameter: name for name, parameter in model.named_parameters()}
            for group, parameters in zip(groups, trainer.model_wrapped.optimizer.bit16_groups, strict=True):
                norms = [names[parameter] for parameter in parameters if "norm" in names[parameter]]
                print(f"group: weight decay {group['weight_decay']}, {len(parameters)} tensors, {len(norms)} norms")

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= LAST


rows = [{"input_ids": torch.randint(0, 64, (8,)), "labels": torch.randint(0, 64, (8,))} for _ in range(64)]
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
)
config = json.loads((Path(__file__).parent / "ds.json").read_text())
config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's fused kernel needs a GPU
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    deepspeed=config,
    bf16=True,
    use_cpu=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    max_steps=1000,
    learning_rate=2e-4,
    lr_scheduler_type="cosine",
    warmup_steps=100,
    weight_decay=0.1,
    adam_beta2=0.95,
    max_grad_norm=0.5,
    logging_steps=10,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Record()])
trainer.train()
engine = trainer.model_wrapped
print("clipping", engine.gradient_clipping(), "betas", engine.optimizer.param_groups[0]["betas"])
for step in (1, 2, 9, 10, 11, 12, 50, 51, 100, 101, 102, LAST):
    print(f"update {step}: {RATES.get(step)}")
