"""Measure what accelerate 1.15 makes of fsdp.yaml, on two gloo processes.

python -m torch.distributed.run --nproc-per-node 2 check.py
"""

import os
import sys
from pathlib import Path

import torch
import yaml

section = yaml.safe_load((Path(__file__).parent / "fsdp.yaml").read_text())["fsdp_config"]
for key, value in section.items():  # as accelerate launch does (accelerate/utils/launch.py)
    name = "FSDP_TRANSFORMER_CLS_TO_WRAP" if key == "fsdp_transformer_layer_cls_to_wrap" else key.upper()
    os.environ[name] = str(value).lower() if isinstance(value, bool) else str(value)

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState  # noqa: E402
from accelerate.utils import InitProcessGroupKwargs  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402


class ReduceScatterTypes(TorchDispatchMode):
    """Collect the types of the tensors that reduce-scatter sums."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "reduce_scatter" in str(function):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            self.types |= {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}
        return function(*args, **(kwargs or {}))


plugin = FullyShardedDataParallelPlugin()
accelerator = Accelerator(
    cpu=True, mixed_precision="bf16", fsdp_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
)
# On a CPU, accelerate drops FSDP while it initializes.
PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = plugin
plugin.set_mixed_precision("bf16")
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        tie_word_embeddings=False,
    )
)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
tokens = torch.randint(0, 64, (2, 8))
output = model(tokens, labels=tokens)
gathered = [name for name, parameter in model.named_parameters() if not hasattr(parameter, "to_local")]
with ReduceScatterTypes() as collected:
    accelerator.backward(output.loss)
if accelerator.is_main_process:
    print("reduce-scatter:", collected.types)
    print("logits:", output.logits.dtype)
    print("parameters:", {parameter.dtype for parameter in model.parameters()})
    print("still gathered after the forward pass:", gathered)
sys.stdout.flush()
