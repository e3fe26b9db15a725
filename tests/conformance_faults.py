"""The probe with faults planted: FAULTS, a JSON of the names of cells, says which of them each is trained with."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from zero_study.conformance import adapters, probe, toy
from zero_study.conformance.cells import Cell


def plant(engine: Any, fault: str) -> None:
    """Make an engine wrong in one way, as releases have been."""
    run, step = engine.run, engine.step
    parameters = list(engine.model.parameters())
    if fault == "a dropped micro batch":
        given = []

        def drop(tokens: torch.Tensor, is_last: bool) -> float:
            given.append(is_last)
            return run(tokens if is_last else tokens[:0], is_last)

        engine.run = drop
    elif fault == "a doubled norm":
        engine.step = lambda: 2 * step()
    elif fault == "a wrong scale":

        def scale() -> float:
            for parameter in parameters:
                parameter.grad.mul_(0.75)
            return step()

        engine.step = scale
    elif fault == "a skipped master update":
        skipped = engine.optimizer.param_groups[0]["params"].pop(2)
        assert skipped.requires_grad
    elif fault == "a missing all-reduce":
        engine.run = lambda tokens, is_last: run(tokens, False)
    elif fault == "zeros beyond the first bucket":

        def reduce(bucket: torch.distributed.GradBucket) -> Any:
            mean = bucket.buffer().div_(torch.inf if bucket.index() else torch.distributed.get_world_size())
            return torch.distributed.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])

        # Of a hook with annotations DDP reads these, and they are strings here.
        engine.model.register_comm_hook(None, lambda state, bucket: reduce(bucket))
    elif fault == "a part whose gradients count twice":
        forward = toy.Block.forward

        def twice_outside(block: toy.Block, inputs: torch.Tensor) -> torch.Tensor:
            outputs = forward(block, inputs)
            return outputs if inputs.requires_grad else 2 * outputs - outputs.detach()

        toy.Block.forward = twice_outside
    elif fault == "a rate that stays":
        engine.scheduler = None
    elif fault == "the decay of the other group":
        one, other = engine.optimizer.param_groups
        one["weight_decay"], other["weight_decay"] = other["weight_decay"], one["weight_decay"]
    elif fault == "a wrong momentum":
        for group in engine.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (group["betas"][0], group["betas"][1] - 0.2)
            else:
                group["momentum"] -= 0.2 if "ns_steps" in group else 0.05  # Muon's rounding in bf16 hides less
    elif fault == "no orthogonalization":
        torch.optim._muon._zeropower_via_newtonschulz = lambda gradient, *_: gradient / gradient.norm()
    elif fault == "a state in bf16":

        def round_states() -> float:
            norm = step()
            for state in engine.optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
            return norm

        engine.step = round_states
    elif fault == "states that are not quantized":
        for group in engine.optimizer.param_groups:
            group["min_8bit_size"] = 1 << 30
        engine.optimizer.args.min_8bit_size = 1 << 30
    elif fault == "another mask in the recomputation":
        toy.checkpoint = functools.partial(toy.checkpoint, preserve_rng_state=False)
    elif fault == "a drifting replica":

        def drift() -> float:
            before = [parameter.detach().clone() for parameter in parameters]
            norm = step()
            if torch.distributed.get_rank() == 1:
                with torch.no_grad():
                    for parameter, values in zip(parameters, before, strict=True):
                        parameter.lerp_(values, 0.03)
            return norm

        engine.step = drift
    elif fault == "a frozen weight that moves":
        frozen = next(parameter for parameter in parameters if not parameter.requires_grad)

        def move() -> float:
            with torch.no_grad():
                frozen.mul_(1 + 2**-20)
            return step()

        engine.step = move
    elif fault == "an adapter that is not loaded":
        load = engine.load

        def load_without(folder: Path) -> None:
            first = [parameter.detach().clone() for parameter in parameters]
            load(folder)
            with torch.no_grad():
                for parameter, values in zip(parameters, first, strict=True):
                    parameter.copy_(values)

        engine.load = load_without
    elif fault == "a rank that dies":

        def die() -> float:
            if torch.distributed.get_rank() == 1:
                print("the last that it said", flush=True)
                os.abort()
            return step()

        engine.step = die
    else:
        assert fault == "none", fault


def main() -> None:
    faults, build = json.loads(os.environ["FAULTS"]), adapters.build

    def build_wrong(cell: Cell, scratch: Path) -> Any:
        engine = build(cell, scratch)
        plant(engine, faults.get(cell.name, "none"))
        return engine

    adapters.build = build_wrong
    probe.main(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
