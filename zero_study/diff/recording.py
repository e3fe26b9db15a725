"""Record sketches of the tensors in the first optimizer steps of a training, in the order of execution.

The recording of a step contains the batch and the random state of every forward pass, the outputs of each module, the
loss, each parameter's gradient as the engine averages it, the gradient norm, each gradient as the optimizer gets it,
and the weights after the update. Without noise, the recording changes no result. All hooks are removed after the last
recorded step.
"""

from __future__ import annotations

import atexit
import functools
import gzip
import hashlib
import json
import os
import secrets
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from .. import terminal
from ..engines.hooks import Listener, without_graphs
from ..engines.readback import full_tensors
from ..engines.readback.dtypes import dtype_names
from ..engines.readback.facts import is_deepspeed, uncompiled, versions
from ..engines.readback.parameters import full_value, is_partitioned, plain_name, whole_size
from ..engines.scripts import rank
from ..engines.step_recorder import StepRecorder
from ..files import write_whole
from ..version import __version__
from . import padding, training
from .recorded import FILE, FORMAT, Entry
from .rounding import Rounding
from .sketch import SIZE, of_rows, sketch

_num_recordings: Counter[Path] = Counter()  # recordings that this process has begun, by folder


class Recorder:
    """A recorder of a training's tensors, which listens to modules, backward passes, clipping and updates.

    It ends when all steps are recorded.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        noise: int | None,
        whole: str | None,
        script: Path | None = None,
        arguments: Sequence[str] | None = None,
    ) -> None:
        """Begin to listen. `script` and `arguments` are those of a training that the recording has started.

        They are None if the script itself starts the recording.
        """
        self._whole = whole  # a prefix of names of modules; their tensors are saved completely
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}
        self._folder = folder if noise is None else folder / f"noise-{noise}"
        self._training = training.Training(script, arguments)
        # The identity of the recording that the noise belongs to.
        self._of = None if noise is None else self._training.token_of_same(folder, rank())
        self._token = ""  # identifies the recording on all ranks, from the first step on
        _num_recordings[self._folder] += 1
        _remove_earlier(self._folder, noise is None)
        self._steps = range(1, steps + 1)
        self._entries: dict[tuple[int, str, str, int], Entry] = {}  # by their first four fields
        self._model: Any = None
        self._names: dict[int, str] = {}  # of modules, by id
        self._backward: dict[str, None] = {}  # parameters, in the order in which backward first came to them
        self._parameters: list[tuple[str, Any]] = []
        self._step = 0  # the current step; 0 before the first one
        self._updated = {""}  # parameters of this step; if there are any, the next forward pass begins a new step
        self._calls: Counter[tuple[str, str | None]] = Counter()
        self._asked: set[str] = set()  # parameters whose norm was computed in this step, before clipping
        self._moments: dict[str, list[float]] = {}  # sketches
        self._has_ended = False
        self._depth = 0
        self._is_in_backward = False
        self._rounding = None if noise is None else Rounding(1000 * noise + rank())
        self._stack = ExitStack()
        self._listen_to(
            StepRecorder(),
            module=self._on_module,
            backward=self._on_backward,
            norm=self._on_norm,
            scaler_step=self._on_scaler,
            before_update=self._before_update,
            after_update=self._after_update,
        )
        atexit.register(self.end)

    def _listen_to(self, recorder: StepRecorder, **listeners: Listener) -> None:
        recorder.listen(**listeners)
        self._stack.callback(recorder.close)

    # ------------------------------------------------------------ the recorded model

    def adopt(self, model: Any) -> None:
        """Choose the model to record, with all its modules."""
        model = uncompiled(model)
        self._model = model
        self._names = {}  # a wrapper has the name of the module in it, which comes later
        for name, module in model.named_modules():
            self._names[id(module)] = plain_name(name, model)
        inner = {name: key for key, name in self._names.items()}
        self._names = {key: name for name, key in inner.items()}
        self._parameters = [(plain_name(name, model), parameter) for name, parameter in model.named_parameters()]
        self._listen_to(StepRecorder(model=model), engine_step=functools.partial(self._on_engine_step, model))
        for name, parameter in self._parameters:
            # FSDP2 sets the gradients of its shards itself, so autograd would never call this hook.
            if parameter.requires_grad and parameter.is_leaf and not hasattr(parameter, "full_tensor"):
                hook = parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, name))
                self._stack.callback(hook.remove)

    def _on_gradient(self, name: str, _: torch.Tensor) -> None:
        """Record the order in which a backward pass reaches the parameters."""
        self._backward.setdefault(name)

    def _adopts(self, module: torch.nn.Module) -> bool:
        """Return whether the outermost module that trains is the recorded model or a part of it.

        If no model was adopted yet, or the module contains the model, the module is adopted first.
        """
        module = uncompiled(module)
        parts = set(map(id, module.modules()))
        is_wider = self._model is None or (not self._step and module is not self._model and id(self._model) in parts)
        if is_wider and any(parameter.requires_grad for parameter in module.parameters()):
            self.adopt(module)
        return id(module) in self._names or module is self._model

    # ------------------------------------------------------------ listeners

    def _on_module(self, call: Any, module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        is_outermost = self._depth == 0
        if self._is_in_backward:  # checkpointing calls a block again
            return call(module, *arguments, **options)
        if is_outermost:
            trains = torch.is_grad_enabled() and module.training and not self._has_ended
            if not (trains and self._adopts(module) and self._begins(arguments, options)):
                return call(module, *arguments, **options)
        self._depth += 1
        # The module in torch.compile's wrapper may be called without this listener, so both have the same name.
        name = self._names.get(id(uncompiled(module)))
        before = self._calls["forward", name]
        try:
            with self._perturbed_pass() if is_outermost else nullcontext():
                outputs = call(module, *arguments, **options)
        finally:
            self._depth -= 1
        if name is not None and self._calls["forward", name] == before:
            self._note_outputs(name, outputs)
        return outputs

    def _begins(self, arguments: Any, options: Any) -> bool:
        """Begin a forward pass, and a new step if weights were updated. Return False if all steps are recorded."""
        if self._updated:
            self._next_step()
        if self._step > len(self._steps):
            self.end()
            return False
        self._token = self._token or _shared_token(self._folder)
        self._add_batch(_tensors(arguments, options))
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
        self._add("random", "", [float(zlib.crc32(state.numpy().tobytes())) for state in states])
        return True

    def _add_batch(self, tensors: dict[str, torch.Tensor]) -> None:
        """Record digests of the rows, and, if the positions of padding are known, of the rows without their padding."""
        digests = _digests({name: _rows(tensor) for name, tensor in tensors.items()})
        positions_by_name = padding.kept_positions(tensors, padding.filling(self._model))
        unpadded = (
            _digests({name: _rows(tensor, positions_by_name.get(name)) for name, tensor in tensors.items()})
            if positions_by_name
            else {}
        )
        lengths = sorted({positions.shape[1] for positions in positions_by_name.values()})
        for part, rows in digests.items():
            call = self._calls["batch", part]
            self._add("batch", part, rows)
            if part in unpadded and (not part or unpadded[part] != rows):
                self._put(Entry(self._step, "unpadded", part, call, 1, "", unpadded[part], [] if part else lengths))

    def _next_step(self) -> None:
        self._read_weights(self._parameters)
        self._step += 1
        for of_step in (self._calls, self._asked, self._updated):
            of_step.clear()

    def _note_outputs(self, name: str, outputs: Any) -> None:
        call = self._calls["forward", name]
        self._calls["forward", name] += 1
        for number, leaf in enumerate(tree_leaves(outputs)):
            # Tensors in a transform of torch.func are left out, because they have no complete value.
            if type(leaf) is torch.Tensor and leaf.is_floating_point() and not is_functorch_wrapped_tensor(leaf):
                rows, sums = of_rows(leaf)
                part = f"{name}:{number}" if number else name
                self._put(Entry(self._step, "forward", part, call, rows, _type(leaf), sums, list(leaf.shape)))
                self._keep("forward", part, call, leaf)

    def _on_backward(self, call: Any, tensors: Any, *arguments: Any, **options: Any) -> Any:
        without_values = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(tensors))  # as if FLOPs are counted
        if self._is_in_backward or not self._step or without_values:
            return call(tensors, *arguments, **options)
        self._is_in_backward = True
        losses = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor) and leaf.numel() == 1]
        self._add("loss", "", [float(leaf.detach()) for leaf in losses])
        try:
            with self._perturbed_pass():
                return call(tensors, *arguments, **options)
        finally:
            self._is_in_backward = False

    def _perturbed_pass(self) -> Any:
        """Return the context of a forward or backward pass: without graphs, and with random rounding if requested."""
        stack = ExitStack()
        stack.enter_context(without_graphs())
        if self._rounding is not None:
            stack.enter_context(self._rounding)
        return stack

    def _on_norm(self, call: Any, tensors: Any, *arguments: Any, **options: Any) -> Any:
        """Record gradients when torch's clipping computes the norm, which is before they are clipped."""
        tensors = list(tensors)
        norm = call(tensors, *arguments, **options)
        clipped = set(map(id, tensors))
        if self._step in self._steps and (mine := [pair for pair in self._parameters if id(pair[1].grad) in clipped]):
            self._read_gradients("gradient", mine)
            self._asked.update(name for name, _ in mine)
            self._add_norm(norm)
        return norm

    def _on_scaler(self, call: Any, scaler: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        """Record an update that GradScaler skips because of an overflow: the weights do not change."""
        result = call(scaler, optimizer, *arguments, **options)
        if not self._updated.issuperset(name for name, _ in self._own(optimizer)):
            self._before_update(optimizer)
            self._after_update(optimizer)
        return result

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if own := self._own(optimizer):  # at a step's first update all parameters, even those without an optimizer
            self._training.note_update(self._step, optimizer)
            self._read_gradients("clipped", own if self._updated else self._parameters)

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        if own := self._own(optimizer):  # perhaps no pass follows; if one does, it reads all weights again
            self._read_weights(own if self._updated else self._parameters)
            self._updated.update(name for name, _ in own)

    def _own(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
        if self._step not in self._steps or is_deepspeed(self._model):
            return []
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [pair for pair in self._parameters if id(pair[1]) in updated]

    def _on_engine_step(self, engine: Any, call: Any, *arguments: Any, **options: Any) -> Any:
        updates = engine is self._model and self._step in self._steps and engine.is_gradient_accumulation_boundary()
        if updates:
            self._training.note_update(self._step, engine.optimizer)
            self._read_gradients("gradient", self._parameters)
        result = call(*arguments, **options)
        if updates:
            self._add_norm(engine.get_global_grad_norm())
            self._read_moments(engine.optimizer)
            self._read_weights(self._parameters)
            self._updated.update(name for name, _ in self._parameters)
        return result

    # ------------------------------------------------------------ reading tensors

    def _read_weights(self, parameters: list[tuple[str, Any]]) -> None:
        for name, parameter in parameters:
            master = full_tensors.master(parameter)
            sums = sketch(full_value(parameter) if master is None else master)
            self._add("weights", name, sums, of=parameter)
            if not is_partitioned(parameter) and parameter.numel():
                self._add("held", name, sums if master is None else sketch(parameter), of=parameter)

    def _read_gradients(self, kind: str, parameters: list[tuple[str, Any]]) -> None:
        """Record gradients in the order of the backward pass.

        If the script does not clip, the same gradients are also recorded as clipped.
        """
        if not self._updated.isdisjoint(name for name, _ in parameters):  # another update without a pass before it
            self._next_step()
        scale = getattr(getattr(self._model, "optimizer", None), "loss_scale", 1.0)  # of DeepSpeed under fp16
        for name, parameter in reversed(parameters):
            if parameter.requires_grad and (gradient := full_tensors.gradient(parameter)) is not None:
                gradient = gradient if scale == 1 else gradient / scale
                sums = sketch(gradient)
                for each in (kind,) if kind == "gradient" or name in self._asked else ("gradient", kind):
                    self._add(each, name, sums, of=parameter)
                    self._keep(each, name, 0, gradient)

    def _read_moments(self, optimizer: Any) -> None:
        """Record a ZeRO optimizer's clipped gradients, computed from the change of Adam's first moment.

        ZeRO clips within its step, so the clipped gradients cannot be read directly.
        """
        groups = getattr(getattr(optimizer, "optimizer", optimizer), "param_groups", [{}])
        beta = groups[0].get("betas", (None,))[0]
        if beta is None or not full_tensors.have_moments(optimizer, (parameter for _, parameter in self._parameters)):
            return
        for name, parameter in reversed(self._parameters):
            if parameter.requires_grad and (moment := full_tensors.moment(parameter)) is not None:
                before, now = self._moments.get(name, [0.0] * SIZE), sketch(moment)
                self._moments[name] = now
                clipped = [(new - beta * old) / (1 - beta) for new, old in zip(now, before, strict=True)]
                self._add("clipped", name, clipped, of=parameter)

    def _keep(self, kind: str, name: str, call: int, tensor: torch.Tensor) -> None:
        if self._whole is not None and name.startswith(self._whole):
            self._kept[self._step, kind, name, call] = tensor.detach().clone().cpu()

    def _add_norm(self, norm: Any) -> None:
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if norm is not None:
            self._add("norm", "", [float(norm)])

    def _add(self, kind: str, name: str, sums: list[float], of: Any = None) -> None:
        """Add an entry. If `of`, a parameter, is given, a later entry in the same step replaces an earlier one."""
        call = self._calls[kind, name] if of is None else 0
        self._calls[kind, name] += 1
        size = 1 if of is None else whole_size(of)
        self._put(Entry(self._step, kind, name, call, size, _type(of), sums, []))

    def _put(self, entry: Entry) -> None:
        self._entries[entry[:4]] = entry

    # ------------------------------------------------------------ the end

    def end(self, raised: BaseException | None = None) -> None:
        """Write the recording and remove all hooks. A second call does nothing.

        `raised` is the error that ended the script, or None.
        """
        atexit.unregister(self.end)
        self._stack.close()
        if self._entries and not self._has_ended:
            facts = {} if self._model is None else _facts(self._model)
            steps = min(self._step, len(self._steps))  # updates without a pass may count further
            completed = min(self._step if self._updated else self._step - 1, steps)
            entries = [entry for entry in self._entries.values() if entry.step <= steps]
            content = {
                "made_by": f"zero-study {__version__}, zero_study.diff", "format": FORMAT, "rank": rank(),
                "token": self._token, "of": self._of, **facts, **self._training.facts(steps),
                "asked": len(self._steps), "steps": steps,
                "completed": completed, "raised": _name_of_failure(raised),
                "backward": list(self._backward), "entries": entries,
            }  # fmt: skip
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._kept:
                torch.save(self._kept, self._folder / f"rank-{rank()}.pt")
            written = json.dumps(content, separators=(",", ":"))
            write_whole(self._folder / f"rank-{rank()}.json.gz", gzip.compress(written.encode(), mtime=0))
            if rank() == 0:
                print(f"Recorded {terminal.count(completed, 'optimizer step')} in {self._folder}.", flush=True)
        self._has_ended = True


def _remove_earlier(folder: Path, is_plain: bool) -> None:
    """Remove the files of an earlier recording, so that they cannot be mistaken for files of this one.

    Each rank removes its own file, and rank 0 also those of ranks that this training does not have. If the new
    recording is without noise (`is_plain`), rank 0 also removes the runs with noise, which belong to the earlier
    recording. Files that this program does not write are kept.
    """
    own, world_size = rank(), int(os.environ.get("WORLD_SIZE", "1"))
    for path in folder.glob("rank-*"):
        match = FILE.fullmatch(path.name.replace(".pt", ".json.gz"))
        if match and path.is_file() and (int(match[1]) == own or (own == 0 and int(match[1]) >= world_size)):
            path.unlink(missing_ok=True)
    if is_plain and own == 0:
        for noise in folder.glob("noise-*"):
            for path in noise.glob("rank-*"):
                if FILE.fullmatch(path.name.replace(".pt", ".json.gz")):
                    path.unlink(missing_ok=True)
            if noise.is_dir() and not any(noise.iterdir()):
                shutil.rmtree(noise)


def _shared_token(folder: Path) -> str:
    """Return an identifier of this recording that is the same on all ranks of the training.

    Ranks of a process group share a random one in the group's store. Without a group, ranks of one launch derive it
    from their launcher.
    """
    mine = secrets.token_hex(16)
    if dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()
        agreed: bytes = store.compare_set(f"zero-study-diff/{folder}/{_num_recordings[folder]}", "", mine)
        return agreed.decode()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        launcher = psutil.Process(os.getppid())
        words = f"{launcher.pid} {launcher.create_time()} {folder} {_num_recordings[folder]}"
        return hashlib.sha256(words.encode()).hexdigest()[:32]
    return mine


def _name_of_failure(raised: BaseException | None) -> str | None:
    """Return the name of the error that ended a script. None if it ended normally."""
    failure = raised if raised is not None else getattr(sys, "last_value", None)  # set by the interpreter
    if failure is None or (isinstance(failure, SystemExit) and failure.code in (None, 0)):
        return None
    return type(failure).__name__


def _facts(model: Any) -> dict[str, Any]:
    buffers = [plain_name(name, model) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    return {
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),  # the group may be gone
        "engine": type(model).__name__,
        "versions": versions(),
        "buffers": buffers,
    }


def _tensors(arguments: Any, options: Any) -> dict[str, torch.Tensor]:
    """Return the input tensors of a forward pass by name, without those that have another number of rows.

    The first tensor decides the number of rows.
    """
    leaves, _ = tree_flatten_with_path((list(arguments), options))
    tensors = {_name_of(path): leaf.detach() for path, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
    num_rows = len(next(iter(tensors.values()))) if tensors else 0
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items() if len(tensor) == num_rows}


def _digests(rows: Mapping[str, Sequence[bytes]]) -> dict[str, list[float]]:
    """Return a digest of each row of a batch, for each tensor by its name, and for all tensors together under ""."""
    whole = [
        float(functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0))
        for parts in zip(*rows.values(), strict=True)
    ]
    return {"": whole, **{name: [float(zlib.crc32(row)) for row in parts] for name, parts in rows.items()}}


def _rows(tensor: torch.Tensor, retained: np.ndarray | None = None) -> list[bytes]:
    """Return the bytes of each row of a tensor, or of the positions in each row that are not padding."""
    if not tensor.numel():
        return [b""] * len(tensor)
    width = tensor.numel() // len(tensor)
    values = tensor.reshape(len(tensor), width).view(torch.uint8).numpy()
    if retained is None:
        return [row.tobytes() for row in values]
    by_position = values.reshape(*retained.shape, -1)
    return [row[positions].tobytes() for row, positions in zip(by_position, retained, strict=True)]


def _name_of(path: tuple[Any, ...]) -> str:
    """Return the name of an input of a forward pass: its keyword, or its position as argument 1, 2 and so on."""
    (_, *inner), is_positional = path, path[0].idx == 0
    keys = [str(getattr(part, "key", getattr(part, "idx", part))) for part in inner]
    return f"argument {int(keys[0]) + 1}" + "".join(f".{key}" for key in keys[1:]) if is_positional else ".".join(keys)


def _type(tensor: Any) -> str:
    return "" if tensor is None else dtype_names({tensor.dtype})[0]
