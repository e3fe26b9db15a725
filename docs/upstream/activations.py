"""What does one block keep for its backward? Counted on transformers' modules in bf16, beside the planner's count.

    python docs/upstream/activations.py reports/cpu/published/activations.json

Bytes per token and hidden unit, without dropout: Llama-3.1-8B's ratios at a quarter of its width, and GPT-2's. The file
keeps what it has of other releases of transformers.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from torch.nn.functional import silu
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama import modeling_llama

from zero_study.theory import computation, shapes
from zero_study.theory.engine import Engine, StepConfig

SIZES = [(1, 256), (1, 512), (1, 1024), (2, 512), (4, 256)]  # sequences, tokens of each
LLAMA = {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2}
GPT = {"n_embd": 512, "n_head": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class NormKernel(torch.autograd.Function):
    """Keeps what a norm of one kernel keeps: its input and a number for each token. The forward pass alone."""

    @staticmethod
    def forward(ctx, hidden, weight):
        scale = torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True))
        ctx.save_for_backward(hidden, weight, scale)
        return (hidden * scale).to(hidden.dtype) * weight


class GateKernel(torch.autograd.Function):
    """Keeps what a SwiGLU of one kernel keeps: the gate and what it lets through. The forward pass alone."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return silu(gate) * up


def llama(attention, kernels):
    config = LlamaConfig(**LLAMA, num_hidden_layers=1, attn_implementation=attention)
    layer = modeling_llama.LlamaDecoderLayer(config, 0)
    if "norms" in kernels:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = lambda hidden, norm=norm: NormKernel.apply(hidden, norm.weight)
    if "gate" in kernels:
        mlp = layer.mlp
        mlp.forward = lambda hidden: mlp.down_proj(GateKernel.apply(mlp.gate_proj(hidden), mlp.up_proj(hidden)))
    return config, layer, modeling_llama.LlamaRotaryEmbedding(config)


def gpt2(attention, kernels):
    activation = "gelu" if kernels else "gelu_new"  # one kernel, and as published: eight operators
    config = GPT2Config(**GPT, n_layer=1, attn_implementation=attention, activation_function=activation)
    return config, GPT2Block(config, 0), None


def kept_bytes(layer, hidden, **given):
    """Count the storages that a forward pass keeps, each once; parameters and rotary tables are not the block's."""
    outside = [*layer.parameters(), *given.get("position_embeddings", ())]
    places = {tensor.untyped_storage().data_ptr() for tensor in outside}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, or its place would be given away again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden, **given)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in places)


def count(build, attention, kernels):
    """For each size, what a block keeps and what the planner says, of modules of which some are one kernel."""
    config, layer, rotary = build(attention, kernels)
    layer.bfloat16()
    shape = shapes.from_config(config.to_dict(), "the layer")
    for sequences, tokens in SIZES:
        hidden = torch.rand(sequences, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        given = {} if rotary is None else {"position_embeddings": rotary(hidden, torch.arange(tokens)[None])}
        fused = {"kernels": "fused" if kernels else "transformers", "has_separate_gates": "gate" not in kernels}
        job = StepConfig(sequences, tokens, attention=attention, **fused)
        planned = computation.block_bytes(shape, Engine("torch", 0, 1, "bf16", 4), job)
        found = (round(each / hidden.numel(), 2) for each in (kept_bytes(layer, hidden, **given), planned))
        yield dict(zip(("sequences", "tokens", "kept", "planner"), (sequences, tokens, *found), strict=True))


torch.manual_seed(0)
cases = [
    (llama, "sdpa", []), (llama, "eager", []), (llama, "sdpa", ["norms"]), (llama, "sdpa", ["norms", "gate"]),
    (gpt2, "sdpa", []), (gpt2, "eager", []), (gpt2, "sdpa", ["activation"]),
]  # fmt: skip
rows = [
    {"block": case[0].__name__, "attention": case[1], "one_kernel": case[2], "sizes": list(count(*case))}
    for case in cases
]
path = Path(sys.argv[1])
content = json.loads(path.read_text()) if path.exists() else {}
# Bytes that others print: ml-engineering's 28 copies, with the layer's output; the Ultra-Scale Playbook's charts of 8B.
content["published"] = {"ml-engineering": 56.0, "playbook": 34.0}
content[f"transformers {transformers.__version__}, torch {version('torch')}"] = rows
path.write_text(json.dumps(content, indent=1) + "\n")
