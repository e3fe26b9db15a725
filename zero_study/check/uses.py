"""Find out what the trainings of a project use, from its configuration files and scripts, for changes of releases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_study.doctor import examine as examining
from zero_study.doctor.examine import Examined
from zero_study.doctor.kinds import Kind
from zero_study.errors import Refusal
from zero_study.upgrade import release_index, used
from zero_study.upgrade.used import Code, Use, Words

# The packages that read each kind of file, and the classes whose settings it has.
_PACKAGES: dict[Kind, tuple[str, ...]] = {
    "accelerate": ("accelerate",),
    "training_arguments": ("transformers",),
    "fsdp_config": ("transformers",),
    "trl": ("trl",),
    "axolotl": ("transformers", "trl", "peft"),
    "llamafactory": ("transformers", "trl", "peft"),
    "ms_swift": ("transformers", "trl", "peft"),
    "torchtitan": ("torch",),
}
_OF_TRAINERS = ("TrainingArguments", "Trainer")
_ENGINES = {"NO": "ddp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"}
_IMPORTS = re.compile(rb"(?m)^\s*(?:from|import)\s+(?:torch|transformers|trl|accelerate|deepspeed|peft|datasets)\b")


def of_project(configs: Iterable[Examined], scripts: Iterable[Path]) -> tuple[list[Use], list[Path]]:
    """Return one `Use` per configuration file of a project, and the scripts that cannot be read.

    Engines that only the scripts start have a `Use` of their own. The list is empty if no file shows a training.
    """
    unreadable: list[Path] = []
    code = used.of_scripts((script for script in scripts if _IMPORTS.search(script.read_bytes())), unreadable)
    uses = [_of_file(examined, code) for examined in configs if examined.kind is not None]
    engines = [engine for engine, word in used.ENGINES.items() if word in code.names]
    engines += ["deepspeed"] * ("deepspeed" in code.packages)
    uses += [
        _of_code(code, engine) for engine in engines if not any(str(use.engine).startswith(engine) for use in uses)
    ]
    return uses or ([replace(_of_code(code, "ddp"), settings={})] if code.packages else []), unreadable


def _of_code(code: Code, engine: str | None) -> Use:
    return Use(engine, packages=code.packages, names=(code.names,), set_keys=code.set_keys)


def of_options(
    configs: Sequence[Path], scripts: Sequence[Path], imports: str | None, stage: int | None, optimizer: str | None
) -> list[Use]:
    """Return what the options of `zero-study upgrade` state about one or several trainings; empty without options.

    Raises Refusal if a file cannot be read or is of an unknown kind, or if options contradict each other.
    """
    if scripts and imports is not None:
        raise Refusal("--script and --imports both say which packages are used. Give one of them.")
    code = used.of_scripts(scripts) if scripts else None
    packages = code.packages if code else None
    if imports is not None:
        modules = [name.strip() for name in imports.split(",") if name.strip()]
        if not modules:
            raise Refusal("--imports: no package is named. Write for instance transformers,trl.")
        packages = used.packages_of(modules)
    if not configs:
        if code is None and packages is None and stage is None and optimizer is None:
            return []
        use = Use() if code is None else _of_code(code, None)
        engine = None if stage is None else "deepspeed"
        return [replace(use, engine=engine, stage=stage, optimizer=optimizer, packages=packages)]
    uses = []
    for path in configs:
        examined = examining.examine(path)
        if examined.kind is None:
            raise Refusal(f"--config {path}: this is a configuration file of no known tool. Name another file.")
        use = _of_file(examined, code)
        if stage is not None and use.engine != "deepspeed":
            raise Refusal(f"--stage {stage}: {path} does not use DeepSpeed. Leave --stage or --config out.")
        if stage is not None and use.stage not in (None, stage):
            raise Refusal(f"--stage {stage}: {path} has stage {use.stage}. Leave --stage out, or change the file.")
        packages_in_use = use.packages if imports is None else packages
        zero_stage = use.stage if stage is None else stage
        uses.append(replace(use, packages=packages_in_use, stage=zero_stage, optimizer=use.optimizer or optimizer))
    return uses


def _of_file(examined: Examined, code: Code | None) -> Use:
    """Return what a configuration file shows, together with the scripts. None: the scripts are not known."""
    kind, content = examined.kind, examined.content
    engine = _engine(examined)
    settings = examined.deepspeed
    if kind == "deepspeed":
        settings = content
    elif kind == "accelerate" and engine == "deepspeed" and settings is None:
        settings = used.of_accelerate(content)
    classes = [*_classes(examined)]
    keys = frozenset(map(str, content))
    set_keys = dict.fromkeys(classes, keys) | ({} if settings is None else used.keys_of_deepspeed(settings))
    if kind == "accelerate":
        set_keys |= dict.fromkeys(used.OF_ACCELERATE, frozenset(used.words_of(content)))
    stage = _stage(settings) if engine == "deepspeed" and settings is not None else None
    optimizer = (settings or {}).get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, dict) else None
    common = (engine, stage, str(name) if name else None, settings if engine == "deepspeed" else {})
    if code is None:
        return Use(*common, set_keys=set_keys)
    words = Words([*used.words_of(content), *used.words_of(settings), *classes])
    packages = code.packages | used.packages_of(_PACKAGES.get(kind, ()) if kind else (), words)
    return Use(*common, packages, (code.names, words), {**code.set_keys, **set_keys})


def _engine(examined: Examined) -> str:
    content = examined.content
    if examined.kind == "accelerate":
        name = str(content.get("distributed_type", "NO"))
        if name == "FSDP":
            section = content.get("fsdp_config")
            version = section.get("fsdp_version", 1) if isinstance(section, dict) else 1
            return f"fsdp{version}"
        return "deepspeed" if name == "DEEPSPEED" else _ENGINES.get(name, "another engine")
    if examined.kind == "deepspeed" or examined.deepspeed is not None or content.get("deepspeed"):
        return "deepspeed"
    if examined.kind == "torchtitan":
        return "fsdp2"
    is_fsdp = examined.kind == "fsdp_config" or content.get("fsdp") or content.get("fsdp_config")
    return "fsdp" if is_fsdp else "ddp"


def _stage(settings: dict[str, Any]) -> int | None:
    section = settings.get("zero_optimization")
    stage = section.get("stage", 0) if isinstance(section, dict) else 0
    return stage if isinstance(stage, int) else None


def _classes(examined: Examined) -> Iterator[str]:
    """Yield the classes whose settings a file has, and the trainers that read them."""
    if examined.kind not in ("training_arguments", "trl", "axolotl", "llamafactory", "ms_swift"):
        return
    yield from _OF_TRAINERS
    if examined.kind == "trl":
        yield "ModelConfig"
        for name in _classes_of_trl(examined):
            yield from (name, f"{name.removesuffix('Config')}Trainer")


def _classes_of_trl(examined: Examined) -> list[str]:
    """Return the classes of settings that a file of TRL can be for, by its name, or else by its keys."""
    index = release_index.read().packages
    newest = index["trl"].defaults_at([*index["trl"].releases][-1])
    classes = {name: {*keys} for name, keys in newest.items() if name.endswith("Config") and name != "ModelConfig"}
    words = re.split(r"[^a-z]+", examined.path.stem.lower())
    if by_name := [name for name in classes if name.removesuffix("Config").lower() in words]:
        return by_name
    arguments = index["transformers"].defaults_at([*index["transformers"].releases][-1])["TrainingArguments"]
    known = {key for keys in classes.values() for key in keys} - {*arguments, *newest["ModelConfig"]}
    own = {*examined.content} & known
    fitting = [name for name, keys in classes.items() if own <= keys]
    return [min(fitting, key=lambda name: len(classes[name]))] if own and fitting else [*classes]
