"""Find out which known changes of releases concern a training, from what its files show.

A change concerns a training if its files show that they use what changes: a package that a script imports, a setting of
a configuration file, or the name of a class or function. What libraries do on their own, and names that a script puts
together while it runs, are in no file, so they are not seen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..engines.keys.patterns import matches
from ..errors import Refusal
from ..files import read_whole, reading

# The packages of the index that a training with a package also uses.
BRINGS = {
    "trl": ("transformers", "accelerate", "datasets", "torch"),
    "transformers": ("accelerate", "torch"),
    "peft": ("torch",),
    "accelerate": ("torch",),
    "deepspeed": ("torch",),
    "bitsandbytes": ("torch",),
    "torchao": ("torch",),
    "liger-kernel": ("torch",),
    "flash-attn": ("torch",),
    "lightning": ("torch",),
    "torchvision": ("torch",),
}
# Words in a script or a configuration file with which another package uses a package of the index.
WORDS = {
    "bitsandbytes": ("load_in_4bit", "load_in_8bit", "BitsAndBytesConfig", "8bit", "32bit", "bnb", "bitsandbytes"),
    "datasets": ("load_dataset", "dataset_name"),
    "flash-attn": ("flash_attention_2", "flash_attn", "flash_attention"),
    "liger-kernel": ("use_liger_kernel", "use_liger", "enable_liger_kernel", "LigerPlugin"),
    "peft": ("use_peft", "LoraConfig", "lora_r", "lora_rank", "peft_config"),
    "torchao": ("TorchAoConfig", "torchao", "float8"),
}
# Words in a script that starts an engine itself.
ENGINES = {
    "fsdp2": r"\nfully_shard\n",
    "fsdp1": r"\nFullyShardedDataParallel\n",
    "fsdp": r"\n(?:FullyShardedDataParallelPlugin|FSDPStrategy|use_fsdp|fsdp|full_shard|fsdp_native)\n",
    "deepspeed": r"(?i)\n(?:use_)?deepspeed(?:_stage_\w+|plugin|strategy|_config)?\n|\nzero_optimization\n",
}
_TRL_CONFIG = re.compile(r"(?:SFT|DPO|GRPO|KTO|RLOO|PPO|ORPO|CPO|GKD|BCO|PRM|XPO|Reward|OnlineDPO|NashMD)Config")
# What the file of an engine or a launcher sets, by the names of its classes in the index of releases.
OF_DEEPSPEED = ("constants", "DeepSpeedConfig", "DeepSpeedZeroConfig")
OF_ACCELERATE = ("launch",)
# Sections of a DeepSpeed JSON whose keys are in a class of their own.
SECTIONS = {
    "bf16": "DeepSpeedBF16Config", "fp16": "DeepSpeedFP16Config", "compile": "CompileConfig",
    "tensor_parallel": "TPTrainingConfig", "hybrid_engine": "HybridEngineConfig",
}  # fmt: skip


class Conditions(Protocol):
    """The conditions under which a change can affect a training. Empty means any training."""

    @property
    def package(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def file(self) -> Mapping[str, Sequence[Any]]: ...
    @property
    def needs(self) -> Mapping[str, Sequence[Any]]: ...
    @property
    def uses(self) -> Sequence[str]: ...
    @property
    def unless(self) -> Mapping[str, Sequence[str]]: ...
    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def key(self) -> str: ...
    @property
    def engines(self) -> Sequence[str]: ...
    @property
    def precisions(self) -> Sequence[str]: ...
    @property
    def several_micro_batches(self) -> bool: ...


class Words:
    """Words in one text, which is searched much faster than a set of words."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._text = "\n".join(["", *sorted({*words}), ""])
        self._known: dict[str, bool] = {}

    def __or__(self, other: Words) -> Words:
        return Words([*self._text.split(), *other._text.split()])

    def __contains__(self, word: object) -> bool:
        return self._has(f"\n{word}\n")

    def has_end(self, word: str) -> bool:
        """Return whether a word ends with this one, as the names of derived classes often do."""
        return self._has(f"{word}\n")

    def matches(self, pattern: str) -> bool:
        """Return whether a regular expression matches anywhere in the words, each of which is on a line of its own."""
        if pattern not in self._known:
            self._known[pattern] = re.search(pattern, self._text) is not None
        return self._known[pattern]

    def _has(self, part: str) -> bool:
        if part not in self._known:
            self._known[part] = part in self._text
        return self._known[part]


@dataclass(frozen=True)
class Code:
    """What Python files show."""

    packages: frozenset[str] = frozenset()  # the packages of the index that they use
    names: Words = field(default_factory=Words)  # identifiers, and words of texts
    # Which keywords all calls of a function give, by its name with its owner, such as AutoModel.from_pretrained.
    set_keys: Mapping[str, frozenset[str]] = field(default_factory=dict)
    parsed: frozenset[str] = frozenset()  # the classes whose settings a parser reads


@dataclass(frozen=True)
class Use:
    """What one configuration file shows of a training, and the scripts beside it. None means that nothing is known."""

    engine: str | None = None  # deepspeed, fsdp1, fsdp2, fsdp for either of them, ddp, or another word
    stage: int | None = None
    optimizer: str | None = None
    settings: Mapping[str, Any] | None = None  # DeepSpeed's JSON
    packages: frozenset[str] | None = None  # the packages of the index that take part
    names: Words | None = None  # of the scripts and of the configuration file
    set_keys: Mapping[str, Container[str]] = field(default_factory=dict)  # the keys that are set, by class or function

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
        if package == "deepspeed" and self.engine not in (None, "deepspeed"):
            return "DeepSpeed is not used"
        if package == "deepspeed" and self.engine == "deepspeed":
            return None
        if self.packages is not None and package not in self.packages:
            return f"{package} is not used"
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
            if is_decided and value is None and key == "optimizer.type":
                if self.names is not None and not _is_optimizer(self.names, values):
                    return "another optimizer"
            elif is_decided and not _fits(key, values, value):
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
        # A program may fill in a missing number of micro batches.
        return value != "auto" and not (value is None and key == "gradient_accumulation_steps"), value

    def _by_names(self, change: Conditions) -> str | None:
        """Return why the files do not use what changes, because no name in them is that of it. None if they may."""
        if self.names is None:
            return None
        if change.uses and not any(map(self.names.has_end, change.uses)):
            return "functions, classes or settings that no file uses"
        calls = [
            any(word in keys for word in words)
            for end, words in change.unless.items()
            for name, keys in self.set_keys.items()
            if name.endswith(end)
        ]
        if calls and all(calls):
            return "every call gives what changes"
        owners = [name for name in change.classes if self.has(name)]
        if change.classes and not owners:
            return "classes that no file uses"
        is_set = [change.key in self.set_keys.get(name, ()) for name in owners]
        if change.kind == "gone" and not any(is_set):
            return "the files do not set what is removed"
        if change.kind != "gone" and is_set and all(is_set):
            return "the files set what changes"
        return None

    def has(self, owner: str) -> bool:
        """Return whether the files use a class, or a method of a class if they name the method, too."""
        if owner in self.set_keys:
            return True
        names = self.names or Words()
        # The name of a derived class often ends with that of its base.
        return all(part in names or (part[:1].isupper() and names.has_end(part)) for part in owner.split("."))


def classes_in_use(uses: Iterable[Use], classes: Sequence[str]) -> list[str]:
    """Return the classes that the files of trainings name."""
    known = [use for use in uses if use.names is not None]
    return [name for name in classes if any(use.has(name) for use in known)]


def why_not(uses: Iterable[Use], change: Conditions) -> str | None:
    """Return why none of several trainings is affected by a change. None if one may be, or if nothing is known."""
    reasons = [use.why_not(change) for use in uses]
    return reasons[0] if reasons and all(reasons) else None


def why_not_package(uses: Iterable[Use], package: str) -> str | None:
    """Return why none of several trainings is affected by a package. None if one may be, or if nothing is known."""
    reasons = [use.why_not_package(package) for use in uses]
    return reasons[0] if reasons and all(reasons) else None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _is_optimizer(words: Words, values: Sequence[Any]) -> bool:
    """Return whether a word is the name of one of these optimizers, such as Muon, PagedLion8bit or lion_32bit."""
    names = "|".join(_letters(str(value)) for value in values)
    capitalized = "|".join(_letters(str(value)).capitalize() for value in values)
    return words.matches(rf"\n(?:\w*_)?(?:{names})(?:_?\d\w*)?\n|(?:{capitalized})(?![a-z])")


def _fits(key: str, values: Sequence[Any], value: Any) -> bool:
    """Return whether a value is one of those that a change concerns. Optimizers have many names, such as paged_lion."""
    if key == "optimizer.type":
        return any(_letters(str(name)) in _letters(str(value)) for name in values)
    if key == "engine":  # fsdp is either version of it
        return any(str(name).startswith(value) or value.startswith(name) for name in values)
    return matches(list(values), value)


# ---------------------------------------------------------------- what files show


def packages_of(modules: Iterable[str], names: Words | None = None) -> frozenset[str]:
    """Return the packages of the index that imported modules use, and those that words in the files stand for."""
    waiting = [module.replace("_", "-") for module in modules]
    waiting += [package for package, ends in WORDS.items() if names and any(map(names.has_end, ends))]
    reached: set[str] = set()
    while waiting:
        package = waiting.pop()
        if package not in reached:
            reached.add(package)
            waiting += BRINGS.get(package, ())
    return frozenset(reached)


def words_of(content: Any) -> Iterator[str]:
    """Yield the keys and the words of the texts in the content of a configuration file."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if value is not False and value is not None:  # what is off is not used
                yield from re.findall(r"\w+", str(key))
                yield from words_of(value)
    elif isinstance(content, list):
        for value in content:
            yield from words_of(value)
    elif isinstance(content, str):
        yield from re.findall(r"\w+", content)


def keys_of_deepspeed(settings: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the keys that a DeepSpeed JSON sets, by the classes of the index of releases that have them."""
    keys = frozenset(str(key) for section in (settings, *_sections(settings)) for key in section)
    used = [name for section, name in SECTIONS.items() if isinstance(settings.get(section), Mapping)]
    return dict.fromkeys([*OF_DEEPSPEED, *used], keys)


def _sections(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for value in settings.values():
        if isinstance(value, Mapping):
            yield value
            yield from _sections(value)


def of_accelerate(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed JSON that accelerate makes of the keys of its own file."""
    section = content.get("deepspeed_config")
    section = section if isinstance(section, dict) else {}
    zero: dict[str, Any] = {"stage": section.get("zero_stage", 2)}
    for target in ("optimizer", "param"):
        zero[f"offload_{target}"] = {"device": section.get(f"offload_{target}_device", "none")}
    named = {key: section[key] for key in ("gradient_clipping", "gradient_accumulation_steps") if key in section}
    precision = {kind: {"enabled": True} for kind in ("bf16", "fp16") if content.get("mixed_precision") == kind}
    return {"zero_optimization": zero, **named, **precision}


def of_scripts(scripts: Iterable[Path], unreadable: list[Path] | None = None) -> Code:
    """Return what scripts show, together with the modules beside them that they import.

    With `unreadable`, imports are not followed, and files that cannot be read are added to this list. Without it,
    raises Refusal if a file cannot be read.
    """
    modules, names = set[str](), set[str]()
    calls: dict[str, list[frozenset[str]]] = {}
    parsed = set[str]()
    for script in scripts:
        for tree in _trees(script) if unreadable is None else _one_tree(script, unreadable):
            nodes = list(ast.walk(tree))
            names |= set(_names(nodes))
            modules |= {name.partition(".")[0] for name in _imported(nodes)} - {""}
            parsed |= set(_parsed(nodes))
            for name, keys in _calls(nodes):
                calls.setdefault(name, []).append(keys)
    names |= {*calls}
    set_keys = {name: frozenset.intersection(*keys) for name, keys in calls.items()}
    words = Words(names)
    return Code(packages_of(modules, words), words, set_keys, frozenset(parsed))


def words_in(text: str) -> Iterator[str]:
    """Yield the words of a text that is not read as Python, with flags as they are named in Python."""
    for word in re.findall(r"[\w-]+", text):
        yield from (word, word.strip("-").replace("-", "_"))


def modules_in(text: str) -> list[str]:
    """Return the modules that lines of a text import, such as those of a notebook."""
    return re.findall(r"(?m)^\s*(?:from|import)\s+(\w+)", text)


def together(first: Mapping[str, frozenset[str]], second: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return the keys that are set wherever a class or a function is used."""
    return {**first, **second} | {name: first[name] & second[name] for name in {*first} & {*second}}


def _parsed(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the classes that a module passes to a parser of arguments, such as HfArgumentParser."""
    for call in nodes:
        if isinstance(call, ast.Call) and _name_of(call.func).endswith("Parser"):
            for name in (name for argument in call.args for name in ast.walk(argument) if isinstance(name, ast.Name)):
                yield from (name.id, *_base_of(name.id))


def _base_of(name: str) -> list[str]:
    """Return TrainingArguments for a class that is derived from it."""
    is_derived = _TRL_CONFIG.fullmatch(name) or (name != "TrainingArguments" and name.endswith("TrainingArguments"))
    return ["TrainingArguments"] if is_derived else []


def _name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name. Empty for another expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the name of each function that a module calls, with and without its owner, and the keywords of the call."""
    for call in nodes:
        if isinstance(call, ast.Call) and (name := _name_of(call.func)):
            keys = frozenset(keyword.arg for keyword in call.keywords if keyword.arg)
            yield from ((each, keys) for each in (name, *_base_of(name)))
            if isinstance(call.func, ast.Attribute) and (owner := _name_of(call.func.value)):
                yield f"{owner}.{name}", keys


def _tree(path: Path) -> ast.Module:
    with reading(path, "a Python script"):
        try:
            return ast.parse(read_whole(path))
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(str(error)) from None


def _one_tree(script: Path, unreadable: list[Path]) -> Iterator[ast.Module]:
    try:
        yield _tree(script)
    except Refusal:
        unreadable.append(script)


def _trees(script: Path) -> Iterator[ast.Module]:
    """Yield the syntax trees of a script and of the modules beside it that it imports."""
    waiting, visited = [script], {script.resolve()}
    while waiting:
        path = waiting.pop()
        tree = _tree(path)
        yield tree
        for module in _imported(ast.walk(tree)):
            for place in _places(script.parent, path, module):
                if place.resolve() not in visited:
                    visited.add(place.resolve())
                    waiting.append(place)


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of imported modules. Relative ones begin with dots."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield name
            yield from (f"{name}{'' if name.endswith('.') else '.'}{alias.name}" for alias in node.names)


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


def _names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the identifiers of a module, and the words of its texts, but not of its docstrings."""
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in documentation:
                yield from re.findall(r"\w+", node.value)
            continue
        for field_name in ("id", "attr", "arg", "name", "module"):
            value = getattr(node, field_name, None)
            if isinstance(value, str):
                yield from (value, *value.split("."))
