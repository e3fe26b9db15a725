"""Measure in which type a release of accelerate keeps the weights of a bfloat16 model under FSDP2.

Run once per release, with the release in front of the path:

    pip install --no-deps --target RELEASE accelerate==1.13.0
    PYTHONPATH=RELEASE python -m torch.distributed.run --nproc-per-node 2 check.py
"""

import accelerate
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import InitProcessGroupKwargs
from torch import nn

torch.manual_seed(0)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
)
accelerator = Accelerator(
    cpu=True, mixed_precision="bf16", fsdp_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
)
# On a CPU, accelerate drops FSDP while it initializes.
PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = plugin
plugin.set_mixed_precision("bf16")
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
model, optimizer = accelerator.prepare(model, optimizer)
before = [parameter.detach().to_local().float().clone() for parameter in model.parameters()]
for step in range(20):
    torch.manual_seed(step)
    loss = model(torch.randn(8, 64)).float().pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
after = [parameter.detach().to_local().float() for parameter in model.parameters()]
unchanged = sum((a == b).sum().item() for a, b in zip(before, after, strict=True))
if accelerator.is_main_process:
    types = {parameter.dtype for parameter in model.parameters()}
    states = {value.dtype for state in optimizer.state.values() for name, value in state.items() if name != "step"}
    total = sum(b.numel() for b in before)
    print(
        f"accelerate {accelerate.__version__}: weights {types}, states {states}, "
        f"{100 * unchanged / total:.0f} % of the weights are unchanged after 20 steps"
    )
