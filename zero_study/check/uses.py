"""Find out what the trainings of a project use, from its configuration files and scripts, for changes of releases."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_study.doctor import config_files
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
_OF_DDP = ("", "NO", "MULTI_GPU", "MULTI_CPU")  # "": accelerate's default
# Python files that name none of these have nothing to do with a training.
_PYTHON = re.compile(
    rb"torch|transformers|trl|accelerate|deepspeed|peft|datasets|lightning|bitsandbytes|liger|flash_attn"
)
TEXTS = (".sh", ".bash", ".sbatch", ".slurm", ".ipynb")


def of_project(configs: Sequence[Examined], files: Iterable[Path], texts: Iterable[Path]) -> list[Use]:
    """Return what the trainings of a project use: one `Use` per engine with its settings.

    `files` are those of the project, of which Python files, job files and notebooks are read, and `texts` are other
    files with settings. Words and packages of all files count for each engine, because a training may read several of
    them. The list is empty if no file shows a training.
    """
    files, unreadable = list(files), list[Path]()
    code = used.of_scripts((path for path in files if path.suffix == ".py" and _is_of_training(path)), unreadable)
    text = "\n".join(_text(path) for path in (*(path for path in files if path.suffix in TEXTS), *unreadable, *texts))
    written = code.names | Words(used.words_in(text))  # in scripts, whose settings are not known
    names = written | Words(word for examined in configs for word in _words(examined))
    modules = [*used.modules_in(text), *(name for examined in configs for name in _packages(examined))]
    packages = code.packages | used.packages_of(modules, names)
    shared = Use(packages=packages, names=names, set_keys=_set_by_all(code, configs))
    uses: list[Use] = []
    for examined in configs:
        use = replace(_of_file(examined), packages=packages, names=names, set_keys=shared.set_keys)
        uses += [use] * (use not in uses)
    configured = {use.engine for use in uses}
    for engine, pattern in used.ENGINES.items():
        is_in_python = engine == "deepspeed" and code.names.matches(r"\nzero_optimization\n|\nDeepSpeedPlugin\n")
        if is_in_python or (engine not in configured and names.matches(pattern)):
            mentioned = dict.fromkeys(used.OF_DEEPSPEED, written) if engine == "deepspeed" else {}
            uses.append(replace(shared, engine=engine, set_keys={**shared.set_keys, **mentioned}))
    return uses or ([replace(shared, engine="ddp", settings={})] if packages else [])


def _set_by_all(code: Code, configs: Iterable[Examined]) -> dict[str, Container[str]]:
    """Return the keys that all scripts and configuration files set that use a class.

    Of a class whose settings a parser reads, only the configuration files are known.
    """
    of_files = functools.reduce(used.together, map(_set_keys, configs), dict[str, frozenset[str]]())
    return {**used.together(code.set_keys, of_files), **dict.fromkeys(code.parsed - {*of_files}, frozenset[str]())}


def _is_of_training(path: Path) -> bool:
    return _PYTHON.search(path.read_bytes()) is not None


def _text(path: Path) -> str:
    """Return the text of a file; of a notebook, the text of its cells with code."""
    text = path.read_text(errors="replace")
    if path.suffix != ".ipynb":
        return text
    try:
        cells = json.loads(text).get("cells", [])
        sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, AttributeError, TypeError, KeyError):
        return text
    return "\n".join(source if isinstance(source, str) else "".join(source) for source in sources)


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
        use = Use() if code is None else Use(names=code.names, set_keys=_set_by_all(code, []))
        engine = None if stage is None else "deepspeed"
        return [replace(use, engine=engine, stage=stage, optimizer=optimizer, packages=packages)]
    uses = []
    for path in configs:
        examined = examining.examine(path)
        if examined.kind is None:
            raise Refusal(f"--config {path}: this is a configuration file of no known tool. Name another file.")
        use = _of_file(examined)
        if code is not None:
            names = code.names | Words(_words(examined))
            in_use = code.packages | used.packages_of(_packages(examined), names)
            use = replace(use, packages=in_use, names=names, set_keys=_set_by_all(code, [examined]))
        if stage is not None and use.engine != "deepspeed":
            raise Refusal(f"--stage {stage}: {path} does not use DeepSpeed. Leave --stage or --config out.")
        if stage is not None and use.stage not in (None, stage):
            raise Refusal(f"--stage {stage}: {path} has stage {use.stage}. Leave --stage out, or change the file.")
        packages_in_use = use.packages if imports is None else packages
        zero_stage = use.stage if stage is None else stage
        uses.append(replace(use, packages=packages_in_use, stage=zero_stage, optimizer=use.optimizer or optimizer))
    return uses


def _packages(examined: Examined) -> tuple[str, ...]:
    """Return the packages that read a configuration file."""
    return () if examined.kind is None else _PACKAGES.get(examined.kind, ())


def _of_file(examined: Examined) -> Use:
    """Return the engine of a configuration file and its settings, and the keys that the file sets."""
    engine, settings = _engine(examined), _settings(examined)
    if engine != "deepspeed" or settings is None:
        return Use(engine, settings=None if engine == "deepspeed" else {}, set_keys=_set_keys(examined))
    file = config_files.DeepSpeedFile(settings)
    return Use(engine, file.stage, file.optimizer_name or None, settings, set_keys=_set_keys(examined))


def _settings(examined: Examined) -> dict[str, Any] | None:
    """Return the DeepSpeed JSON that a file is, contains, names, or that accelerate makes of it."""
    if examined.kind == "deepspeed":
        return examined.content
    if examined.kind == "accelerate" and examined.deepspeed is None and _engine(examined) == "deepspeed":
        return used.of_accelerate(examined.content)
    return examined.deepspeed


def _words(examined: Examined) -> Iterator[str]:
    """Yield the words of a configuration file, and the classes that read it."""
    yield from used.words_of(examined.content)
    yield from used.words_of(_settings(examined))
    yield from _classes(examined)


def _set_keys(examined: Examined) -> dict[str, frozenset[str]]:
    """Return the keys that a configuration file sets, by the class that has them."""
    settings = _settings(examined)
    keys = dict.fromkeys(_classes(examined), frozenset(map(str, examined.content)))
    if examined.kind == "accelerate":
        keys |= dict.fromkeys(used.OF_ACCELERATE, frozenset(used.words_of(examined.content)))
    return keys | ({} if settings is None else used.keys_of_deepspeed(settings))


def _engine(examined: Examined) -> str:
    content = examined.content
    if examined.kind == "accelerate":
        file = config_files.AccelerateFile(content)
        engines = {"DEEPSPEED": "deepspeed", "FSDP": f"fsdp{file.fsdp_version}"} | dict.fromkeys(_OF_DDP, "ddp")
        return engines.get(file.kind, "another engine")
    if examined.kind == "deepspeed" or examined.deepspeed is not None or content.get("deepspeed"):
        return "deepspeed"
    if examined.kind == "torchtitan":
        return "fsdp2"
    is_fsdp = examined.kind == "fsdp_config" or content.get("fsdp") or content.get("fsdp_config")
    return "fsdp" if is_fsdp else "ddp"


def _classes(examined: Examined) -> Iterator[str]:
    """Yield the classes whose settings a file has, and the trainers that read them."""
    if examined.kind not in ("training_arguments", "trl", "axolotl", "llamafactory", "ms_swift"):
        return
    yield from _OF_TRAINERS
    for key in ("rl", "rlhf_type", "stage"):  # of axolotl, ms-swift and LLaMA-Factory, such as dpo
        if isinstance(method := examined.content.get(key), str):
            yield from (f"{method.upper()}Config", f"{method.upper()}Trainer")
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
    return fitting if own and fitting else [*classes]
