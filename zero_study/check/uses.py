"""Find out what the trainings of a project use, from its configuration files and scripts, for changes of releases."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
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
    unreadable: list[Path] = []
    files = list(files)
    code = used.of_scripts((path for path in files if path.suffix == ".py" and _is_of_training(path)), unreadable)
    others = [path for path in files if path.suffix in TEXTS]
    plain = "\n".join(_text(path) for path in (*others, *unreadable, *texts))
    known = [examined for examined in configs if examined.kind is not None]
    own = [*used.words_in(plain), *(word for examined in known for word in _words(examined))]
    words = (code.names, Words(own))
    modules = [*used.modules_in(plain), *(name for each in known for name in _PACKAGES.get(each.kind or "ddp", ()))]
    packages = code.packages | used.packages_of(modules, words[1])
    set_keys = dict(code.set_keys)
    of_files: dict[str, frozenset[str]] = {}
    for examined in known:
        of_files = used.together(of_files, _set_keys(examined))
    set_keys = used.together(set_keys, of_files) | dict.fromkeys(code.parsed - {*of_files}, frozenset[str]())
    shared = Use(packages=packages, names=words, set_keys=set_keys)
    uses: list[Use] = []
    for examined in known:
        use = replace(_of_file(examined), packages=packages, names=words, set_keys=set_keys)
        uses += [use] * (use not in uses)
    engines = [engine for engine, pattern in used.ENGINES.items() if any(each.matches(pattern) for each in words)]
    in_code = Words([*used.words_in(plain)])
    for engine in engines:
        is_configured = engine in {use.engine for use in uses}
        if not is_configured or code.names.matches(r"\nzero_optimization\n|\nDeepSpeedPlugin\n"):
            uses.append(replace(shared, engine=engine, set_keys=set_keys | _mentioned(engine, code, in_code)))
    return uses or ([replace(shared, engine="ddp", settings={})] if packages else [])


class _Mentioned:
    """The keys that texts mention, of which it is not known whether they set them."""

    def __init__(self, *texts: Words) -> None:
        self._texts = texts

    def __contains__(self, key: object) -> bool:
        return any(key in words for words in self._texts)


def _mentioned(engine: str, code: Code, plain: Words) -> dict[str, Container[str]]:
    return dict.fromkeys(used.OF_DEEPSPEED, _Mentioned(code.names, plain)) if engine == "deepspeed" else {}


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
        use = Use() if code is None else Use(names=(code.names,), set_keys=_with_parsed(code))
        engine = None if stage is None else "deepspeed"
        return [replace(use, engine=engine, stage=stage, optimizer=optimizer, packages=packages)]
    uses = []
    for path in configs:
        examined = examining.examine(path)
        if examined.kind is None:
            raise Refusal(f"--config {path}: this is a configuration file of no known tool. Name another file.")
        use = _of_file(examined)
        if code is not None:
            words = Words(_words(examined))
            in_use = code.packages | used.packages_of(_PACKAGES.get(examined.kind, ()), words)
            set_keys = used.together(_with_parsed(code), _set_keys(examined))
            use = replace(use, packages=in_use, names=(code.names, words), set_keys=set_keys)
        if stage is not None and use.engine != "deepspeed":
            raise Refusal(f"--stage {stage}: {path} does not use DeepSpeed. Leave --stage or --config out.")
        if stage is not None and use.stage not in (None, stage):
            raise Refusal(f"--stage {stage}: {path} has stage {use.stage}. Leave --stage out, or change the file.")
        packages_in_use = use.packages if imports is None else packages
        zero_stage = use.stage if stage is None else stage
        uses.append(replace(use, packages=packages_in_use, stage=zero_stage, optimizer=use.optimizer or optimizer))
    return uses


def _with_parsed(code: Code) -> dict[str, frozenset[str]]:
    return {**code.set_keys, **dict.fromkeys(code.parsed, frozenset[str]())}


def _of_file(examined: Examined) -> Use:
    """Return the engine of a configuration file and its settings, and the keys that the file sets."""
    engine, settings = _engine(examined), _settings(examined)
    stage = _stage(settings) if engine == "deepspeed" and settings is not None else None
    optimizer = (settings or {}).get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, dict) else None
    of_engine = settings if engine == "deepspeed" else {}
    return Use(engine, stage, str(name) if name else None, of_engine, set_keys=_set_keys(examined))


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
