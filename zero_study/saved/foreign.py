"""Read files of other programs without trusting them, and limit the time of checks that may never end."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from ..errors import Refusal
from ..terminal import printable
from .content import Saved

_SECONDS = 30.0  # of CPU time for one check, besides what its tensors need
_SECONDS_PER_BYTE = 1 / 50e6
_BYTES = 4 << 30  # that one check may need, besides its tensors
_MOST_MODULES = 100_000  # layers, heads or experts; no model has as many
_COUNT = re.compile(r"(?:num|n)_\w*(?:layers?|blocks?|heads?|experts?)|\w*_?layers?|n_?(?:layer|head)s?")
_MOST_CHARACTERS = 1 << 28  # of a JSON file


class Unusual(ValueError):
    """Raised for a file whose content is not what its name says. The message completes "the file ..."."""


class OverLimit(Exception):
    """Raised in a check that takes too much time or memory."""


# ---------------------------------------------------------------- JSON


class _Content(BaseModel):
    """The keys that are used, with the types that the libraries write. Other keys are not validated."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class _Model(_Content):
    """The content of config.json."""

    architectures: list[StrictStr] | None = None
    model_type: StrictStr | None = None
    dtype: StrictStr | dict[StrictStr, Any] | None = None
    torch_dtype: StrictStr | dict[StrictStr, Any] | None = None
    auto_map: dict[StrictStr, Any] | None = None
    quantization_config: dict[StrictStr, Any] | None = None
    vocab_size: StrictInt | None = None


class _Adapter(_Content):
    """The content of adapter_config.json."""

    peft_type: StrictStr | None = None
    base_model_name_or_path: StrictStr | None = None
    r: StrictInt | None = None
    lora_alpha: StrictInt | StrictFloat | None = None
    bias: StrictStr | None = None
    use_dora: StrictBool | None = None
    target_modules: StrictStr | list[StrictStr] | None = None
    exclude_modules: StrictStr | list[StrictStr] | None = None
    target_parameters: StrictStr | list[StrictStr] | None = None
    modules_to_save: StrictStr | list[StrictStr] | None = None
    rank_pattern: dict[StrictStr, StrictInt] | None = None
    alpha_pattern: dict[StrictStr, StrictInt | StrictFloat] | None = None
    layers_to_transform: StrictInt | list[StrictInt] | None = None
    trainable_token_indices: list[StrictInt] | dict[StrictStr, list[StrictInt]] | None = None


class _Index(_Content):
    """The content of model.safetensors.index.json."""

    weight_map: dict[StrictStr, StrictStr]
    metadata: dict[StrictStr, Any] | None = None


class _Trainer(_Content):
    """The content of trainer_state.json."""

    global_step: StrictInt
    epoch: StrictInt | StrictFloat | None = None


_SHAPES: dict[str, type[_Content]] = {
    "config.json": _Model, "adapter_config.json": _Adapter, "trainer_state.json": _Trainer,
}  # fmt: skip
_PATTERNS = ("target_modules", "exclude_modules", "layers_pattern")  # a string is a regular expression there


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises Unusual if there is none, or if a key has an impossible type."""
    try:
        if path.stat().st_size > _MOST_CHARACTERS:
            raise Unusual(f"has {path.stat().st_size:,} bytes, which is impossible for this kind of file")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise Unusual(f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, Unusual):
            raise
        raise Unusual(f"is not valid JSON: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise Unusual("has no JSON object")
    validate(path.name, content)
    return content


def validate(name: str, content: dict[str, Any]) -> None:
    """Raise Unusual if a key in the content of a JSON file of this name has an impossible type."""
    shape = _Index if name.endswith(".index.json") else _SHAPES.get(name)
    try:
        if shape is not None:
            shape.model_validate(content)
    except (ValidationError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise Unusual("is nested too deeply") from None
        first = error.errors(include_url=False, include_input=True)[0]
        key = ".".join(str(part) for part in first["loc"][:1])
        value = "missing" if first["type"] == "missing" else _short(content.get(key))
        raise Unusual(f"has an impossible value of `{key}`: {value}") from None
    if shape is _Model:
        _check_counts(content)
    if shape is _Adapter:
        _check_patterns(content)


def _check_counts(content: dict[str, Any], depth: int = 0) -> None:
    """Refuse a configuration that describes a model of a size that nobody can build."""
    for key, value in content.items():
        if isinstance(value, dict) and depth < 8:
            _check_counts(value, depth + 1)
        elif type(value) in (int, float) and _COUNT.fullmatch(key) and not abs(value) <= _MOST_MODULES:
            raise Unusual(f"says `{key}`: {_short(value)}, which no model has")


def _check_patterns(content: dict[str, Any]) -> None:
    """Refuse regular expressions that are none."""
    expressions = [value for key in _PATTERNS if isinstance(value := content.get(key), str)]
    expressions += [key for name in ("rank_pattern", "alpha_pattern") for key in content.get(name) or {}]
    for expression in expressions:
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError) as error:
            reason = first_line(error)
            raise Unusual(f"has `{_short(expression)}`, which is not a regular expression ({reason})") from None


def _short(value: Any) -> str:
    try:
        text = printable(repr(value))
    except ValueError:  # a number with thousands of digits
        return "a number with too many digits"
    return text if len(text) < 60 else f"{text[:50]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message on one printable line, or the error's type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0][:160]) if lines else type(error).__name__


# ---------------------------------------------------------------- checks that may fail


@contextlib.contextmanager
def guarded(saved: Saved, what: str) -> Iterator[None]:
    """Report an error in a `with` block as a finding: the saved files have contents that the check does not expect.

    A check that takes too much time or memory ends in a finding, too. A Refusal is passed on.
    """
    size = sum(tensor.size for tensor in (*saved.tensors.values(), *saved.states.values())) * 8
    try:
        with limited(_SECONDS + size * _SECONDS_PER_BYTE, _BYTES + size):
            yield
    except Refusal:
        raise
    except OverLimit as limit:
        saved.wrong("unreadable", f"{what} could not be checked. The check was ended, because it needs {limit}.")
    except Exception as error:  # foreign content may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        saved.wrong("unreadable", f"{what} could not be checked, because its content is not as expected ({reason}).")


@contextlib.contextmanager
def limited(seconds: float, num_bytes: int = _BYTES) -> Iterator[None]:
    """Raise OverLimit if a `with` block needs more CPU time or memory. Outside the main thread, there is no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    start, peak = time.process_time(), _peak()

    def look(signum: int, frame: FrameType | None) -> None:
        if time.process_time() - start > seconds:
            raise OverLimit(f"more than {seconds:.0f} seconds")
        if _peak() - peak > num_bytes:
            raise OverLimit(f"more than {num_bytes / 2**30:.0f} GiB of memory")

    earlier = signal.signal(signal.SIGPROF, look)
    timer = signal.setitimer(signal.ITIMER_PROF, 0.25, 0.25)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, *timer)
        signal.signal(signal.SIGPROF, earlier)


def _peak() -> int:
    """Return the largest number of bytes that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
