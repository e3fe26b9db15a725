"""Find out what a training uses, and which changes of releases therefore cannot affect it.

`zero-study upgrade` leaves such changes out. Only what is certain counts: whatever a file leaves open, for instance by
"auto" or by a missing key that a program fills in, may be anything.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..engines.keys.patterns import matches
from ..errors import Refusal
from ..files import CONFIGS, load, read_whole, read_yaml, reading

# The packages of the index that a package can import when it trains.
REACHES = {
    "trl": ("transformers", "accelerate", "datasets", "peft", "deepspeed", "liger-kernel", "bitsandbytes"),
    "transformers": (
        "torch", "accelerate", "datasets", "peft", "deepspeed", "bitsandbytes", "torchao", "liger-kernel", "flash-attn",
    ),
    "accelerate": ("torch", "deepspeed", "bitsandbytes", "torchao", "transformers", "datasets", "peft"),
    "peft": ("torch", "transformers", "accelerate", "bitsandbytes", "torchao", "deepspeed", "datasets"),
    "deepspeed": ("torch", "transformers"),
    "datasets": ("torch", "transformers"),
    "bitsandbytes": ("torch",),
    "torchao": ("torch", "transformers"),
    "liger-kernel": ("torch", "transformers", "peft"),
    "flash-attn": ("torch", "transformers"),
    "torch": (),
}  # fmt: skip
# Packages that train nothing by themselves, and what they can import of the packages above.
HARMLESS = {
    **dict.fromkeys(
        (
            "numpy", "pandas", "scipy", "sklearn", "matplotlib", "PIL", "tqdm", "yaml", "requests", "rich", "click",
            "fire", "omegaconf", "hydra", "pydantic", "packaging", "psutil", "wandb", "tensorboard", "einops", "nltk",
            "jsonlines", "regex", "sentencepiece", "tokenizers", "safetensors", "huggingface_hub", "pyarrow", "dotenv",
            "jinja2", "sympy", "numba", "h5py", "cv2", "soundfile", "librosa", "tiktoken", "typing_extensions",
        ),
        (),
    ),
    "torchvision": ("torch",),
    "torchaudio": ("torch",),
    "triton": ("torch",),
    "evaluate": ("datasets", "transformers"),
}  # fmt: skip
# What can import or start something that is not written in a script: modules, functions, and functions of `os`.
DYNAMIC_MODULES = {"importlib", "runpy", "subprocess", "multiprocessing"}
DYNAMIC_CALLS = {"__import__", "exec", "eval"}
DYNAMIC_OF_OS = re.compile(r"system|popen|exec\w+|spawn\w+")
# Trainers that are not derived from another trainer of trl, except from one that `uses` in faults.json also names.
INDEPENDENT = {
    "Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer", "GRPOTrainer", "RLOOTrainer", "KTOTrainer", "CPOTrainer",
    "ORPOTrainer", "RewardTrainer", "PPOTrainer", "BCOTrainer", "PRMTrainer", "OnlineDPOTrainer", "GKDTrainer",
}  # fmt: skip
OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
# Sections of a DeepSpeed JSON whose missing keys have DeepSpeed's defaults. Programs fill in other missing keys.
DECIDED = ("zero_optimization.", "data_types.", "torch_autocast.")
_OF_DEEPSPEED = {
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16",
    "fp16", "optimizer", "scheduler", "gradient_clipping", "zero_allow_untested_optimizer", "activation_checkpointing",
}  # fmt: skip


class Conditions(Protocol):
    """The conditions under which a change can affect a training. Empty means any training."""

    @property
    def package(self) -> str: ...
    @property
    def file(self) -> Mapping[str, Sequence[Any]]: ...
    @property
    def needs(self) -> Mapping[str, Sequence[Any]]: ...
    @property
    def uses(self) -> Sequence[str]: ...
    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def engines(self) -> Sequence[str]: ...
    @property
    def precisions(self) -> Sequence[str]: ...
    @property
    def several_micro_batches(self) -> bool: ...


@dataclass(frozen=True)
class Use:
    """The facts about a training that are certain. None means unknown."""

    engine: str | None = None  # deepspeed, fsdp, ddp, or another word for anything else
    stage: int | None = None
    optimizer: str | None = None
    settings: Mapping[str, Any] | None = None  # DeepSpeed's JSON
    packages: frozenset[str] | None = None  # the packages of the index that can take part
    names: frozenset[str] | None = None  # the identifiers in the script and in its own modules
    notes: tuple[str, ...] = ()  # why something could not be narrowed

    def why_not(self, change: Conditions) -> str | None:
        """Return why this training is not affected by a change. None if it may be."""
        if reason := self.why_not_package(change.package):
            return reason
        for reason in (self._by_engines(change), self._by_values(change), self._by_names(change)):
            if reason:
                return reason
        return None

    def why_not_package(self, package: str) -> str | None:
        """Return why this training is not affected by changes of a package. None if it may be."""
        if self.packages is not None and package not in self.packages:
            return f"{package} is not used"
        if package == "deepspeed" and self.engine not in (None, "deepspeed"):
            return "DeepSpeed is not used"
        return None

    def _by_engines(self, change: Conditions) -> str | None:
        """Return why a fault that conformance found cannot concern this training."""
        if not change.engines:
            return None
        if self.stage is not None and not any(self._can_be(engine) for engine in change.engines):
            return "the training uses another ZeRO stage or another offload"
        if (own := self._precision()) and own not in change.precisions:
            return "another precision"
        is_single = self._value("gradient_accumulation_steps") == (True, 1)
        return "one micro batch per step" if change.several_micro_batches and is_single else None

    def _can_be(self, engine: str) -> bool:
        """Return whether this training can be one of an engine of the conformance matrix, such as zero1_cpu_offload."""
        stage, _, variation = engine.partition("_")
        is_decided, device = self._value("zero_optimization.offload_optimizer.device")
        offload = "" if device in (None, "none") else f"{device}_offload"
        return stage == f"zero{self.stage}" and (not is_decided or variation == offload)

    def _precision(self) -> str | None:
        """Return the precision class of the conformance matrix, if DeepSpeed's JSON decides it."""
        if self._value("torch_autocast.enabled") == (True, True):
            return "autocast"
        if not any(self._value(f"{kind}.enabled") == (True, True) for kind in ("bf16", "fp16")):
            return None
        is_fp32 = self._value("data_types.grad_accum_dtype")[1] in ("fp32", "float32", "float")
        return "bf16_fp32_sum" if is_fp32 else "bf16"

    def _by_values(self, change: Conditions) -> str | None:
        """Return why the configuration's values rule out a change. None if they do not."""
        for key, values in {**change.file, **change.needs}.items():
            is_decided, value = self._value(key)
            if is_decided and not _fits(key, values, value):
                words = {"engine": "another engine", "zero_optimization.stage": "another ZeRO stage"}
                return words.get(key, "another optimizer" if key == "optimizer.type" else f"another value of {key}")
        return None

    def _value(self, key: str) -> tuple[bool, Any]:
        """Return whether the value of a key of DeepSpeed's JSON is known, and the value: text in lower case."""
        chosen = {"engine": self.engine, "zero_optimization.stage": self.stage, "optimizer.type": self.optimizer}
        if chosen.get(key) is not None:
            return True, chosen[key]
        if self.engine not in (None, "deepspeed") and key.startswith("zero_optimization."):
            return True, "(not DeepSpeed)"
        if self.settings is None or key == "engine":
            return False, None
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            value = int(value) if value.isdecimal() else value.lower()
        is_decided = key.startswith(DECIDED) if value is None else value != "auto"
        return is_decided, value

    def _by_names(self, change: Conditions) -> str | None:
        """Return why a script does not use what changes, because the names in it differ. None if it may."""
        if self.names is not None and change.uses and not _mentions(self.names, change.uses):
            is_certain = change.package != "trl" or not self._has_other_trainers()
            return "trainers or functions that the script does not use" if is_certain else None
        owners = {name.partition(".")[0] for name in change.classes}
        if self._has_other_classes(change.package, owners):
            return "classes that the script does not use"
        if change.package == "torch" and self.optimizer is not None and owners and owners <= {*OPTIMIZERS}:
            own = _letters(self.optimizer)
            return None if any(_letters(name) in own for name in owners) else "another optimizer"
        return None

    def _has_other_trainers(self) -> bool:
        """Return whether the script uses trainers of trl that may be derived from others."""
        return any(name.endswith("Trainer") and name not in INDEPENDENT for name in self.names or ())

    def first(self, classes: Sequence[str]) -> list[str]:
        """Sort classes so that those that the script names come first."""
        names = self.names or frozenset()
        return sorted(classes, key=lambda name: name.partition(".")[0] not in names)

    def _has_other_classes(self, package: str, owners: set[str]) -> bool:
        """Return whether these classes of settings of trainers are not used by the script."""
        if self.names is None or not owners:
            return False
        if package == "trl" and all(owner.endswith(("Config", "Trainer", "Arguments")) for owner in owners):
            stems = [re.sub(r"(Script)?(Config|Trainer|Arguments)$", "", owner) for owner in owners]
            return not _mentions(self.names, [f"{stem}{end}" for stem in stems for end in ("Config", "Trainer")])
        if package == "transformers" and owners <= {"TrainingArguments", "Seq2SeqTrainingArguments"}:
            return not _mentions(self.names, ["TrainingArguments", "Trainer", "Config", "HfArgumentParser"])
        return False


def _mentions(names: frozenset[str], words: Sequence[str]) -> bool:
    """Return whether a name ends with one of these words, as the names of derived classes often do."""
    return any(name.endswith(tuple(words)) for name in names)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _fits(key: str, values: Sequence[Any], value: Any) -> bool:
    """Return whether a value is one of those that a change concerns. Optimizers have many names, such as paged_lion."""
    if key == "optimizer.type":
        return any(_letters(str(name)) in _letters(str(value)) for name in values)
    return matches(list(values), value)


# ---------------------------------------------------------------- from files and options


def of(
    config: Path | None = None,
    script: Path | None = None,
    imports: str | None = None,
    stage: int | None = None,
    optimizer: str | None = None,
) -> Use:
    """Return the facts about a training that the options of `zero-study upgrade` state.

    Raises Refusal if a file cannot be read or is of another kind, or if options contradict each other.
    """
    if script is not None and imports is not None:
        raise Refusal("--script and --imports both say which packages are used. Give one of them.")
    engine, settings = (None, None) if config is None else _of_config(config)
    imported = _Imports() if script is None and imports is None else _of_code(script, imports)
    if "deepspeed" in imported.direct and engine != "deepspeed":
        engine = None  # the script may start DeepSpeed itself
    if stage is not None:
        if engine not in (None, "deepspeed"):
            raise Refusal(f"--stage {stage}: {config} does not use DeepSpeed. Leave --stage or --config out.")
        engine = "deepspeed"
    use = Use(engine=engine, settings=settings, optimizer=optimizer)
    is_decided, file_stage = use._value("zero_optimization.stage")
    of_file = (0 if file_stage is None else file_stage) if is_decided and engine == "deepspeed" else None
    if stage is not None and of_file not in (None, stage):
        raise Refusal(f"--stage {stage}: {config} has stage {of_file}. Leave --stage out, or change the file.")
    of_file = of_file if isinstance(of_file, int) else None
    is_type_decided, name = use._value("optimizer.type")
    return Use(
        engine, stage if stage is not None else of_file, str(name) if is_type_decided and name else optimizer, settings,
        imported.packages, imported.names, tuple(imported.notes),
    )  # fmt: skip


def _of_config(path: Path) -> tuple[str, Mapping[str, Any] | None]:
    """Return the engine of an accelerate file or a DeepSpeed JSON, and the content of DeepSpeed's JSON."""
    is_yaml = path.suffix in (".yaml", ".yml")
    content = read_yaml(path, CONFIGS) if is_yaml else load(path, "JSON")
    if not isinstance(content, dict):
        raise Refusal(f"--config {path}: the file has no keys. Name an accelerate file or a DeepSpeed JSON.")
    kind = content.get("distributed_type")
    if kind is None and _OF_DEEPSPEED & {*content} and not is_yaml:
        return "deepspeed", content
    if kind == "DEEPSPEED":
        return "deepspeed", _of_accelerate(path, content)
    if kind is None:
        raise Refusal(f"--config {path}: this is neither an accelerate file nor a DeepSpeed JSON. Name one of these.")
    words = {"FSDP": "fsdp", "NO": "ddp", "False": "ddp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"}
    return words.get(str(kind), "another engine"), None


def _of_accelerate(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the DeepSpeed JSON that accelerate makes of its own file, as far as the file decides it."""
    section = content.get("deepspeed_config")
    section = section if isinstance(section, dict) else {}
    json_name = section.get("deepspeed_config_file")
    if json_name not in (None, "none"):
        places = [Path(str(json_name)), path.parent / str(json_name)]
        settings = load(next((place for place in places if place.is_file()), places[0]), "JSON")
        if not isinstance(settings, dict):
            raise Refusal(f"--config {path}: the file {json_name}, which it names, has no keys. Correct this file.")
        return settings
    zero = {"stage": section.get("zero_stage", 2)}
    for target in ("optimizer", "param"):
        zero[f"offload_{target}"] = {"device": section.get(f"offload_{target}_device", "none")}
    return {"zero_optimization": zero}


@dataclass
class _Imports:
    """What code imports, and the identifiers in it. None means unknown."""

    direct: set[str] = field(default_factory=set)  # the packages of the index that it imports itself
    packages: frozenset[str] | None = None
    names: frozenset[str] | None = None
    notes: list[str] = field(default_factory=list)


def _of_code(script: Path | None, imports: str | None) -> _Imports:
    """Return what a script with its own modules imports, or what --imports names."""
    if script is None:
        modules = {name.strip() for name in (imports or "").split(",")} - {""}
        if not modules:
            raise Refusal("--imports: no package is named. Write for instance transformers,trl.")
        return _reached(modules, None)
    names, own_classes, modules, dynamic = set(), set(), set(), set()
    for tree in _trees(script):
        names |= set(_names(tree))
        own_classes |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        modules |= {name.partition(".")[0] for name in _modules(tree, script.parent)}
        dynamic |= set(_dynamic(tree))
    imported = _reached(modules, frozenset(names - own_classes))
    if dynamic:
        note = f"The script uses {', '.join(sorted(dynamic))} and may therefore import or start anything."
        return _Imports(imported.direct, notes=[f"{note} Use --imports to name the packages that the script uses."])
    return imported


def _reached(modules: Collection[str], names: frozenset[str] | None) -> _Imports:
    """Return which packages of the index modules can import. `names` are the identifiers of the script."""
    packages = {module.replace("_", "-") for module in modules}
    direct = packages & {*REACHES}
    recognized = {*sys.stdlib_module_names, *HARMLESS, *(package.replace("-", "_") for package in REACHES), *REACHES}
    if unknown := sorted({*modules} - recognized):
        note = f"It is not known what {', '.join(unknown)} can import, so no package is left out."
        return _Imports(direct, notes=[note])
    # LigerORPOTrainer is derived from a class of trl.
    more = {"trl"} if "liger-kernel" in direct else set()
    reached = _closure({*direct, *more, *(package for module in modules for package in HARMLESS.get(module, ()))})
    return _Imports(direct, reached, names)


def _dynamic(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules and calls with which a module can import or start unnamed code."""
    yield from ({name.partition(".")[0] for name in _imported(tree)} & DYNAMIC_MODULES)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function, arguments = call.func, call.args
        if isinstance(function, ast.Name) and function.id in DYNAMIC_CALLS:
            yield function.id
        elif isinstance(function, ast.Name) and function.id == "getattr" and len(arguments) > 1:
            owner = arguments[0].id if isinstance(arguments[0], ast.Name) else ""
            if owner.replace("_", "-") in REACHES and not isinstance(arguments[1], ast.Constant):
                yield f"getattr({owner}, ...)"
        elif isinstance(function, ast.Attribute) and DYNAMIC_OF_OS.fullmatch(function.attr) and _is_os(function.value):
            yield f"os.{function.attr}"


def _is_os(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "os"


def _closure(packages: set[str]) -> frozenset[str]:
    """Return packages with everything that they can import."""
    reached: set[str] = set()
    waiting = [*packages]
    while waiting:
        package = waiting.pop()
        if package not in reached:
            reached.add(package)
            waiting += REACHES[package]
    return frozenset(reached)


def _trees(script: Path) -> Iterator[ast.Module]:
    """Yield the syntax trees of a script and of the modules beside it that it imports.

    Raises Refusal if one of them cannot be read.
    """
    waiting, visited = [script], {script.resolve()}
    while waiting:
        path = waiting.pop()
        with reading(path, "a Python script"):
            try:
                tree = ast.parse(read_whole(path))
            except (SyntaxError, RecursionError, MemoryError) as error:
                raise ValueError(str(error)) from None
        yield tree
        for module in _imported(tree):
            for place in _places(script.parent, path, module):
                if place.resolve() not in visited:
                    visited.add(place.resolve())
                    waiting.append(place)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names of imported modules. Relative ones begin with dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield name
            yield from (f"{name}{'' if name.endswith('.') else '.'}{alias.name}" for alias in node.names)


def _modules(tree: ast.Module, folder: Path) -> Iterator[str]:
    """Yield the names of imported modules that are not beside the script."""
    for name in _imported(tree):
        first = name.partition(".")[0]
        if first and not (folder / f"{first}.py").is_file() and not (folder / first).is_dir():
            yield first


def _places(folder: Path, importing: Path, module: str) -> Iterator[Path]:
    """Yield the files of a module that lies beside the script or beside the module that imports it."""
    level = len(module) - len(module.lstrip("."))
    base = folder
    if level:
        base = importing.parent
        for _ in range(level - 1):
            base = base.parent
    parts = module.lstrip(".").split(".") if module.lstrip(".") else []
    for number in range(len(parts) + 1):
        package = base.joinpath(*parts[:number])
        candidates = [package / "__init__.py", *([package.with_suffix(".py")] if number else [])]
        yield from (place for place in candidates if (number or level) and place.is_file())


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the identifiers of a module, and the words of its texts that could be names."""
    for node in ast.walk(tree):
        for value in (getattr(node, name, None) for name in ("id", "attr", "name", "module", "value")):
            if isinstance(value, str):
                yield from re.findall(r"\w+", value)
