"""Compute parameters, bytes and saved tensors of low-rank adapters (LoRA, DoRA) on frozen, maybe quantized weights.

The counts of a model (shapes/counts.py) have its Linear modules, and the bytes that a block saves only for the
gradients of its weights. The rules for the names of targets and the forward pass of an adapter are those of PEFT 0.21,
in its modules tuners.lora.layer and tuners.lora.dora.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from zero_study.theory import frozen
from zero_study.theory.model_states import master_bytes
from zero_study.theory.shapes.adapter import ALL_LINEAR, FrozenType
from zero_study.theory.shapes.adapter import Adapter as Adapter
from zero_study.theory.shapes.adapter import AdapterKind as AdapterKind
from zero_study.theory.shapes.config_json import MODEL_TYPES, kinds_of_layers
from zero_study.theory.shapes.counts import LinearCounts, ModelCounts
from zero_study.theory.shapes.shape import ParameterSizes

if TYPE_CHECKING:
    from zero_study.theory.engine import Engine, StepConfig
    from zero_study.theory.shapes import ModelShape

# By model_type. shapes/model_types.yaml explains these names and states their sources.
DEFAULT_TARGETS = {name: each.default_targets for name, each in MODEL_TYPES.items() if each.default_targets}
EXPERT_NAMES = {name: each.expert_names for name, each in MODEL_TYPES.items() if each.expert_names}
# Model types whose blocks multiply with transformers' Conv1D instead of torch's Linear.
CONV1D_TYPES = ("gpt2",)
HEADS = ("classifier", "score", "qa_outputs")  # heads that PEFT trains in whole for a task of classification
# Bits per weight in NF4 with double quantization (arXiv:2305.14314, sec. 3): 4, an 8-bit scale for 64 weights, and an
# fp32 scale for 256 of these scales.
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)


@dataclass(frozen=True, kw_only=True)
class Linear(LinearCounts):
    """All Linear modules of a model that have the same name in blocks of one kind."""

    count: int  # modules in the model
    executions: int  # of these modules in a forward pass
    in_block: bool
    is_parameter: bool = False  # a router, or the weights of all experts: a parameter and not a Linear module
    num_experts: int = 1  # matrices of this size in one parameter
    num_fused: int = 1  # matrices that are stacked in `outer`; PEFT's rank is this many times as large

    def rank(self, adapter: Adapter) -> int:
        """Return the rank of the adapter of this module, summed over experts."""
        return adapter.rank * self.num_fused * self.num_experts

    def rows_of(self, batch: float, length: float) -> float:
        """Return the rows that all modules multiply for `batch` sequences of `length` tokens each."""
        return self.executions * self.rows.of(batch, length)


# ---------------------------------------------------------------- the modules of a model


def model_type_of(shape: ModelShape) -> str:
    """Return the model_type of a shape. Raises ValueError if the names of its modules are not known."""
    if shape.counts.outside.linears or any(kind.linears for kind in shape.counts.kinds):
        if shape.architecture == "traced":
            return str((shape.config or {}).get("model_type"))
        return next(name for name, each in MODEL_TYPES.items() if each.architecture == shape.architecture)
    raise ValueError(
        f"{shape.name}: the names of its modules are unknown, so adapters cannot be added. They are known for models "
        "with formulas and for vision-language models, and with PyTorch for every config.json of transformers"
    )


@lru_cache(maxsize=256)
def linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the Linear modules of a model. Those of the blocks come first.

    Raises ValueError if the names of its modules are not known.
    """
    model_type_of(shape)
    return _linears(shape.counts)


def _linears(counts: ModelCounts) -> tuple[Linear, ...]:
    found: dict[LinearCounts, tuple[int, int]] = {}  # kinds of blocks may have the same modules
    for number, kind in enumerate(counts.kinds):
        for each in kind.linears:
            copies, executions = found.get(each, (0, 0))
            found[each] = copies + counts.copies[number], executions + counts.executed.count(number)
    of_blocks = [
        Linear(**vars(each), count=copies, executions=executions, in_block=True)
        for each, (copies, executions) in found.items()
    ]
    outside = (Linear(**vars(each), count=1, executions=1, in_block=False) for each in counts.outside.linears)
    return (*of_blocks, *outside)


def expert_parameters(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the routers and the experts of a model that are plain parameters. Empty if they are modules."""
    model_type = model_type_of(shape)
    if model_type not in EXPERT_NAMES:
        return ()
    number = shape.layers - kinds_of_layers(model_type, shape).count("dense")
    of_blocks = partial(Linear, count=number, executions=number, in_block=True, is_parameter=True)
    hidden, inner, experts = shape.hidden, shape.feed_forward, shape.experts
    return (
        of_blocks("mlp.gate", hidden, experts),
        of_blocks("mlp.experts.gate_up_proj", hidden, 2 * inner, num_experts=experts, num_fused=2),
        of_blocks("mlp.experts.down_proj", inner, hidden, num_experts=experts),
    )


def _is_named(linear: Linear, names: tuple[str, ...]) -> bool:
    return any(linear.name == name or linear.name.endswith(f".{name}") for name in names)


def targeted(shape: ModelShape, adapter: Adapter) -> tuple[Linear, ...]:
    """Return the Linear modules that get an adapter.

    In a model that also encodes images, the rules of PEFT include the vision tower. If this tower is frozen, neither it
    nor the projector behind it gets an adapter, as in LLaMA-Factory and ms-swift.

    Raises ValueError if a target is not in the model.
    """
    return _targeted(base_of(shape), adapter)


@lru_cache(maxsize=256)
def _targeted(shape: ModelShape, adapter: Adapter) -> tuple[Linear, ...]:
    saved = _saved_modules(shape, adapter)
    of_experts = _targeted_experts(shape, adapter)
    names_of_experts = EXPERT_NAMES.get(model_type_of(shape), {})
    of_model = [
        linear
        for linear in linears(shape)
        if linear.name.rpartition(".")[2] not in names_of_experts and (linear.in_block or not shape.counts.frozen)
    ]
    if adapter.targets == (ALL_LINEAR,):
        return (*(linear for linear in of_model if not linear.is_output and linear not in saved), *of_experts)
    targets = tuple(target for target in target_names(shape, adapter) if target not in names_of_experts)
    for target in targets:
        if not any(_is_named(linear, (target,)) for linear in of_model):
            of_linears = (linear.name.rpartition(".")[2] for linear in of_model)
            known = ", ".join(dict.fromkeys([*of_linears, *names_of_experts]))
            raise ValueError(f"{shape.name} has no Linear module named {target!r}. It has {known}")
    return (*(linear for linear in of_model if _is_named(linear, targets) and linear not in saved), *of_experts)


def _targeted_experts(shape: ModelShape, adapter: Adapter) -> tuple[Linear, ...]:
    """Return the routers and experts that get an adapter. Linear modules of the same names then get none.

    Raises ValueError for adapters that PEFT cannot add to parameters.
    """
    names = EXPERT_NAMES.get(model_type_of(shape), {})
    requested = set(names) if adapter.targets == (ALL_LINEAR,) else names.keys() & set(adapter.targets or ())
    parts = {names[name] for name in requested}
    if not parts:
        return ()
    if missing := {name for name, part in names.items() if part in parts} - requested:
        raise ValueError(
            f"{shape.name} has one parameter for {' and '.join(sorted(requested | missing))}, so PEFT "
            f"needs all of these names or stops with an error. Add {', '.join(sorted(missing))} to --lora-target"
        )
    if adapter.kind == "dora" or adapter.has_dropout:
        option = "--adapter dora" if adapter.kind == "dora" else "--lora-dropout"
        raise ValueError(
            f"{shape.name}: PEFT would stop with an error, because the adapters of experts and routers work neither "
            f"with DoRA nor with dropout. Remove {option}, or name the modules of attention: --lora-target "
            "q_proj,k_proj,v_proj,o_proj"
        )
    return tuple(each for each in expert_parameters(shape) if each.name.rpartition(".")[2] in parts)


def with_adapter(shape: ModelShape, adapter: Adapter | None) -> ModelShape:
    """Return a model's shape with an adapter. Without requested targets, they are PEFT's default, or else all-linear.

    Raises ValueError if the model lacks the adapter's modules.
    """
    if adapter is None:
        return shape
    if shape.architecture == "traced" and shape.experts:
        raise ValueError(f"{shape.name}: adapters are not predicted for this mixture of experts. Train all weights")
    if adapter.targets is None and model_type_of(shape) not in DEFAULT_TARGETS:
        adapter = dataclasses.replace(adapter, targets=(ALL_LINEAR,))
    targeted(shape, adapter)
    return dataclasses.replace(shape, adapter=adapter)


def target_names(shape: ModelShape, adapter: Adapter) -> tuple[str, ...]:
    """Return the names of the modules that get an adapter: the requested ones, or PEFT's default."""
    return adapter.targets or DEFAULT_TARGETS[model_type_of(shape)]


def is_quantized(shape: ModelShape) -> bool:
    return shape.adapter is not None and shape.adapter.is_quantized


def base_of(shape: ModelShape) -> ModelShape:
    """Return a model's shape without its adapters."""
    return shape if shape.adapter is None else dataclasses.replace(shape, adapter=None)


# ---------------------------------------------------------------- parameters


@lru_cache(maxsize=256)
def trained_sizes(shape: ModelShape) -> ParameterSizes:
    """Return the sizes of the trainable parameters: adapters and whole modules, or all parameters without adapters."""
    if shape.adapter is None:
        return shape.parameters
    adapter = shape.adapter
    matrices: list[int] = []
    vectors: list[int] = []
    for linear in targeted(shape, adapter):
        for _ in range(linear.count):
            matrices += [linear.rank(adapter) * linear.inner, linear.rank(adapter) * linear.outer]
            vectors += [linear.outer] if adapter.kind == "dora" else []
    for linear in _saved_modules(shape, adapter):
        matrices.append(linear.elements)
        vectors += [linear.outer] if linear.has_bias else []
    return ParameterSizes(tuple(matrices), tuple(vectors))


def _saved_modules(shape: ModelShape, adapter: Adapter) -> list[Linear]:
    """Return the Linear modules outside the blocks that are trained in whole, with the modules that contain them."""
    outside = [linear for linear in linears(base_of(shape)) if not linear.in_block]
    return [linear for linear in outside if set(linear.name.split(".")) & set(adapter.modules_to_save)]


def num_trainable(shape: ModelShape) -> int:
    """Return the number of trainable parameters, as PEFT counts them."""
    return trained_sizes(shape).num_params


def num_total(shape: ModelShape) -> int:
    """Return the number of all parameters: the model's own, also if they are frozen, and those of the adapters."""
    return _num_base(shape) + (0 if shape.adapter is None else num_trainable(shape))


# ---------------------------------------------------------------- bytes of weights


def frozen_bytes(shape: ModelShape, engine: Engine) -> float:
    """Return the bytes of all frozen weights of a model with adapters, before they are sharded."""
    assert shape.adapter is not None
    quantized = quantized_elements(shape)
    return frozen_size(engine, shape.adapter) * (_num_base(shape) - quantized) + NF4_BITS / 8 * quantized


def _num_base(shape: ModelShape) -> int:
    """Return the number of parameters without adapters."""
    return shape.num_params + frozen.num_params(shape)


def frozen_bytes_of_rank(shape: ModelShape, engine: Engine) -> float:
    """Return the bytes of a rank's frozen weights: all of them at stages 0 to 2, and a shard at stage 3.

    These are the weights under adapters, and those of a frozen part of the model. Without adapters, DeepSpeed casts
    this part with the whole model to its type. FSDP2 keeps the type in which its weights were loaded, which is fp32 if
    the others have masters. 0 if all weights are trained.
    """
    shards = engine.num_shards if engine.zero_stage == 3 else 1
    if shape.adapter is not None:
        return frozen_bytes(shape, engine) / shards
    size = master_bytes(engine) if engine.kind == "fsdp" else engine.parameter_bytes
    return size * frozen.num_params(shape) / shards


def quantized_elements(shape: ModelShape) -> int:
    """Return the number of elements of the quantized weights: those of all Linear modules except the output layer."""
    assert shape.adapter is not None
    if not shape.adapter.is_quantized:
        return 0
    of_part = () if shape.counts.frozen is None else _linears(shape.counts.frozen)
    modules = (*linears(base_of(shape)), *of_part)
    return sum(linear.count * linear.elements for linear in modules if not linear.is_output)


def frozen_size(engine: Engine, adapter: Adapter) -> int:
    """Return the bytes per element of the frozen weights that are not quantized.

    DeepSpeed casts the whole model to its type. Elsewhere the weights keep the type in which they were loaded
    (accelerate 1.15, utils/fsdp_utils.py: fsdp2_prepare_model casts trainable parameters only).
    """
    if engine.compute_bytes == 4:
        return 4
    if engine.kind == "deepspeed":
        return engine.parameter_bytes
    if adapter.has_fp32_stream(engine) and adapter.unquantized == "fp32":
        return 4
    return 4 if adapter.frozen == "fp32" else 2


def frozen_share(shape: ModelShape, engine: Engine) -> float:
    """Return the bytes of the frozen weights, divided by those of the whole model in its compute type."""
    return frozen_bytes(shape, engine) / (engine.compute_bytes * _num_base(shape))


def engine_of_trained(engine: Engine, adapter: Adapter | None) -> Engine:
    """Return an engine whose precision class describes the states of the trained parameters.

    DeepSpeed casts adapters to the model's type and keeps fp32 masters of them. FSDP2 of accelerate keeps them in fp32.
    Without an engine, and under DDP, they are in the type in which PEFT creates them, and have no masters.
    """
    if adapter is None or engine.kind == "deepspeed" or engine.compute_bytes == 4:
        return engine
    if engine.kind == "fsdp":
        return dataclasses.replace(engine, precision="bf16") if adapter.in_fp32 else engine
    return dataclasses.replace(engine, precision="fp32" if adapter.in_fp32 else "pure-bf16")


# ---------------------------------------------------------------- activations


def saved_before_peak(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the bytes that a frozen block saves nevertheless, and frees before the peak of its backward pass.

    They are the inputs of the last feed-forward Linear, if DeepSpeed's stage 3 saves them (`saves_frozen_inputs`), and
    those of experts with adapters.
    """
    by_experts = sum(
        engine.compute_bytes * _products_per_token(shape, linear) / shape.layers * linear.inner
        for linear in adapted_parameters(shape)
        if linear.name.endswith("down_proj")
    )
    by_engine = saved_inputs(shape, engine, job, only_down=True) if saves_frozen_inputs(shape, engine) else 0.0
    return job.tokens * by_experts + by_engine


def saves_frozen_inputs(shape: ModelShape, engine: Engine) -> bool:
    """Return whether the Linear modules of a block save their inputs although their weights are frozen.

    Under stage 3, DeepSpeed replaces torch.nn.functional.linear by a function that saves its input whether its weight
    needs a gradient or not (zero/linear.py, LinearFunctionForZeroStage3). Conv1D does not call this function, and
    bitsandbytes multiplies with quantized weights in a function of its own. Experts are not Linear modules. Whether
    they save their inputs was not checked.
    """
    if shape.adapter is None or shape.adapter.is_quantized:
        return False
    is_stage_3 = engine.kind == "deepspeed" and engine.zero_stage == 3
    return is_stage_3 and model_type_of(shape) not in CONV1D_TYPES


def saved_inputs(shape: ModelShape, engine: Engine, job: StepConfig, only_down: bool = False) -> float:
    """Return the bytes of the inputs of a block's Linear modules that nothing else saves, as a mean over blocks.

    The inputs are saved before autocast casts them. Those of the hidden size come from norms, which return fp32 then.
    """
    adapter = shape.adapter
    is_cast = engine.precision.endswith("-autocast") and adapter is not None and adapter.frozen == "fp32"
    total = 0.0
    for each in linears(base_of(shape)):
        if each.in_block and each.group == each.name and not each.input_is_saved and (each.is_down or not only_down):
            size = 4 if is_cast and each.inner == shape.hidden else engine.compute_bytes
            total += size * each.inner * each.rows_of(job.micro_batch_size, job.rank_length)
    return total / shape.layers


def adapted_parameters(shape: ModelShape) -> list[Linear]:
    """Return the routers and experts with an adapter. Empty without adapters.

    PEFT adds the product of an adapter's matrices to the whole parameter in each forward pass. The backward pass needs
    this sum, and computes a gradient of the same size.
    """
    if shape.adapter is None:
        return []
    return [linear for linear in targeted(shape, shape.adapter) if linear.is_parameter]


def _products_per_token(shape: ModelShape, linear: Linear) -> int:
    """Return how many of the matrices of all blocks multiply one token, for a router or the experts."""
    return linear.count * (shape.experts_per_token if linear.num_experts > 1 else 1)


def expert_gradient_flops(shape: ModelShape, tokens: float) -> float:
    """Return the FLOPs of the weight gradients of routers and experts that have an adapter."""
    return sum(2 * tokens * _products_per_token(shape, each) * each.elements for each in adapted_parameters(shape))


def adapter_bytes(shape: ModelShape, engine: Engine, job: StepConfig) -> float:
    """Return the bytes that the adapters of a block save, as a mean over blocks.

    Each adapter saves its input and the result of its first matrix. If the input is cast or dropped, every adapter
    saves a copy. Otherwise all adapters of a tensor share it, and it counts only if nothing else saves it. DoRA also
    saves the results of the frozen product and of the adapter. Routers and experts with an adapter save the inputs of
    their own products, like trained ones. If the frozen products save their inputs (`saves_frozen_inputs`), these are
    included.
    """
    adapter = shape.adapter
    assert adapter is not None
    saves_inputs = saves_frozen_inputs(shape, engine)
    size = _product_size(engine, adapter)
    is_cast = _casts_inputs(engine, adapter)
    # On a GPU, a dropout mask has a byte per element. On a CPU, it has the type of the input that PEFT cast.
    mask = 1 if job.device == "gpu" else 4 if is_cast else size
    total, shared = 0.0, set[str]()
    for linear in targeted(shape, adapter):
        if not linear.in_block:
            continue
        if linear.is_parameter:
            total += job.tokens * engine.compute_bytes * _products_per_token(shape, linear) * linear.inner
            continue
        of_row: float = size * adapter.rank
        if adapter.has_dropout:
            of_row += linear.inner * (size + mask)
        elif is_cast:
            of_row += size * linear.inner
        elif not (linear.input_is_saved or saves_inputs) and linear.group not in shared:
            shared.add(linear.group)
            of_row += size * linear.inner
        if adapter.kind == "dora":
            of_row += linear.outer * (size + (size if adapter.has_dropout else engine.compute_bytes))
        total += of_row * linear.rows_of(job.micro_batch_size, job.rank_length)
    return total / shape.layers + (saved_inputs(shape, engine, job) if saves_inputs else 0.0)


def copied_weight_bytes(shape: ModelShape, engine: Engine) -> float:
    """Return the bytes of weight copies that a block saves because of its adapters, as a mean over blocks.

    With dropout, DoRA multiplies the dropped input with the frozen weight again, cast to the type of the adapter.
    Routers and experts are copied with their adapter added.
    """
    adapter = shape.adapter
    if parameters := adapted_parameters(shape):
        assert adapter is not None
        return sum(_sum_bytes(each, engine, adapter) for each in parameters) / shape.layers
    if adapter is None or adapter.kind != "dora" or not adapter.has_dropout or not _casts_inputs(engine, adapter):
        return 0.0
    elements = sum(each.count * each.elements for each in targeted(shape, adapter) if each.in_block)
    return _product_size(engine, adapter) * elements / shape.layers


def _sum_bytes(linear: Linear, engine: Engine, adapter: Adapter) -> float:
    """Return the bytes of a router or of experts with their adapter added, in all blocks.

    Autocast makes a second copy in its own type if the parameter is in fp32. PEFT casts the matrices of experts to the
    type of the parameter, and autograd saves these copies too.
    """
    size = frozen_size(engine, adapter) if engine.kind in ("torch", "ddp") else engine.compute_bytes
    copies = size + (engine.compute_bytes if size > engine.compute_bytes else 0)
    elements = linear.num_experts * linear.elements
    is_cast = linear.num_experts > 1 and size < 4 and _product_size(engine, adapter) == 4
    cast = size * linear.rank(adapter) * (linear.inner + linear.outer) if is_cast else 0
    return float(linear.count * (copies * elements + cast))


def _product_size(engine: Engine, adapter: Adapter) -> int:
    """Return the bytes per element of the inputs of an adapter's products."""
    without_autocast = engine.kind in ("torch", "ddp") and engine.precision == "pure-bf16"
    return 4 if without_autocast and adapter.in_fp32 else engine.compute_bytes


def _casts_inputs(engine: Engine, adapter: Adapter) -> bool:
    """Return whether PEFT casts the input of an adapter to another type, and autograd saves the copy."""
    return engine.kind in ("torch", "ddp") and engine.compute_bytes == 2 and adapter.in_fp32


def forward_temporaries(shape: ModelShape, engine: Engine) -> float:
    """Return the temporary bytes that adapters need in the forward pass of a block.

    The largest of these counts: DoRA's norm of a weight, a dequantized weight, and experts with adapters. DoRA makes
    the adapter's matrix from a square matrix with ones on its diagonal, adds it to a copy of the weight and takes the
    norm of each row. Experts with an adapter have a gradient of the size of the whole parameter.
    """
    adapter = shape.adapter
    if adapter is None:
        return 0.0
    size = _product_size(engine, adapter)
    of_dora = (
        size * (each.inner**2 + 3 * each.elements) if adapter.kind == "dora" and each.in_block else 0
        for each in targeted(shape, adapter)
    )
    of_experts = sum(engine.compute_bytes * each.num_experts * each.elements for each in adapted_parameters(shape))
    dequantized = 0.0
    if adapter.is_quantized:
        dequantized = float(
            engine.compute_bytes * max(each.elements for each in linears(base_of(shape)) if each.in_block)
        )
    return dequantized + max(of_dora, default=0) + of_experts


# ---------------------------------------------------------------- computing


def adapter_flops(shape: ModelShape, sequence_length: float) -> float:
    """Return the FLOPs of all adapters in the forward pass for one sequence.

    Those of routers and experts are left out: they are added to the weights, which does not depend on the tokens.
    """
    if shape.adapter is None:
        return 0.0
    rank = shape.adapter.rank
    modules = (each for each in targeted(shape, shape.adapter) if not each.is_parameter)
    return sum(2 * rank * each.rows_of(1, sequence_length) * (each.inner + each.outer) for each in modules)


def from_options(
    rank: int | None,
    target: str | None = None,
    kind: AdapterKind = "lora",
    dropout: float = 0.0,
    load_in_4bit: bool = False,
    head: str = "tokens",
    frozen: FrozenType = "16-bit",
) -> Adapter | None:
    """Return the adapter that the options of a command describe. None if they have no rank.

    `target` is a list of names with commas, `all-linear`, or None for PEFT's default. `head` is that of the shape: PEFT
    trains the head of a classifier in whole.
    """
    if rank is None:
        return None
    names = None if target is None else tuple(name.strip() for name in target.split(",") if name.strip())
    return Adapter(
        rank=rank,
        targets=names,
        kind=kind,
        has_dropout=dropout > 0,
        frozen="nf4" if load_in_4bit else frozen,
        modules_to_save=HEADS if head in ("sequence classes", "token classes") else (),
    )
