"""Load files that torch.save wrote, without running code that is in them.

A pickle can run any code when it is loaded. torch loads tensors and plain data without that risk. The classes of
DeepSpeed that are in every one of its checkpoints are replaced by classes without behavior.
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import Refusal
from ..terminal import printable
from .foreign import first_line

# What torch says of a class or function that is neither a tensor's nor plain data.
_NEEDED = re.compile(r"(?i)unsupported (?:global: )?(?:GLOBAL|class) (\S+)|unrecognized function (.+)|Can only build")


_ZIP = b"PK\x03\x04"  # the first bytes of a zip archive
_MOST_REPEATED = 1 << 24  # elements of a tensor that are stored once and repeated, such as a mask
_MOST_VALUES = 10_000_000


class Unreadable(Exception):
    """Raised for a file that is damaged."""


class Plain:
    """A stand-in for a class of DeepSpeed. It has the attributes of the pickled object, but no methods."""


class _Stage(int):
    """A stand-in for DeepSpeed's enumeration of the ZeRO stages."""


_LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_STAND_INS: list[Any] = [
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *(
        (type(name.rpartition(".")[2], (Plain,), {}), name)
        for name in (
            f"{_LOSS_SCALERS}.LossScaler",
            f"{_LOSS_SCALERS}.DynamicLossScaler",
            f"{_LOSS_SCALERS}.LossScalerBase",
            "deepspeed.utils.tensor_fragment.fragment_address",
            "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
            "argparse.Namespace",
        )
    ),
]


def _plain_numpy() -> list[Any]:
    """Return numpy's functions and classes that a pickled number or array needs."""
    from numpy import dtypes

    scalar, rebuild = np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]
    numbers = [getattr(dtypes, name) for name in dir(dtypes) if name.endswith("DType")]
    names = [(scalar, f"{module}.scalar") for module in ("numpy.core.multiarray", "numpy._core.multiarray")]
    names += [(rebuild, f"{module}._reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")]
    return [*names, np.ndarray, np.dtype, *numbers]


def load(path: Path, trust: bool) -> Any:
    """Return the content of a file that torch.save wrote. Tensors are mapped from the file and read when they are used.

    Raises Unreadable if the file is damaged, and Refusal if loading it would run code. `trust` loads such a file, too.
    """
    check_sums(path)
    return _load(path, path.name, lambda source, **options: torch.load(source, **options), trust)


def check_bytes(content: bytes) -> None:
    """Raise Unreadable if a checksum in bytes that torch.save wrote does not match."""
    if content[:4] == _ZIP:
        _check_archive(io.BytesIO(content))


def load_bytes(content: bytes, name: str, trust: bool) -> Any:
    """Return the content of bytes that torch.save wrote. See `load`."""
    check_bytes(content)
    return _load(io.BytesIO(content), name, lambda source, **options: torch.load(source, **options), trust)


def _load(source: Any, name: str, loader: Callable[..., Any], trust: bool) -> Any:
    options: dict[str, Any] = {"map_location": "cpu"}
    if isinstance(source, Path) and zipfile.is_zipfile(source):
        options["mmap"] = True
    try:
        with torch.serialization.safe_globals([*_STAND_INS, *_plain_numpy()]):
            return _possible(loader(source, weights_only=True, **options))
    except Unreadable:
        raise
    except pickle.UnpicklingError as error:
        needed = _NEEDED.search(str(error))
        if needed is None:
            raise Unreadable("it has no content that torch can read") from None
        if not trust:
            cause = needed[1] or needed[2] or needed[0]
            raise Refusal(
                f"{name}: this file contains more than tensors and plain data ({printable(cause)}), and "
                "loading it would run code. If you trust the file's author as you trust a program, add --trust-pickle."
            ) from None
    except Exception as error:  # a damaged file may raise anything
        raise Unreadable(first_line(error)) from None
    try:
        if isinstance(source, io.BytesIO):
            source.seek(0)
        return loader(source, weights_only=False, **options)
    except Exception as error:  # a pickle may raise anything
        raise Unreadable(f"loading it raises {type(error).__name__}: {first_line(error)}") from None


def check_sums(path: Path) -> None:
    """Raise Unreadable if a file of torch.save is cut off, or if a checksum in it does not match."""
    if not path.is_file():
        raise Unreadable("it does not exist")
    if not path.stat().st_size:
        raise Unreadable("it is empty")
    with open(path, "rb") as file:
        is_zip = file.read(4) == _ZIP
    if is_zip:  # the format before torch 1.6 has no checksums
        _check_archive(path)


def _check_archive(source: Path | io.BytesIO) -> None:
    """Raise Unreadable if a zip archive is cut off, or if a checksum in it does not match."""
    try:
        with zipfile.ZipFile(source) as archive:
            broken = archive.testzip()
    except Exception as error:  # a damaged archive may raise anything
        raise Unreadable(f"it is cut off or damaged ({first_line(error)})") from None
    if broken is not None:
        raise Unreadable(f"it is damaged: the checksum of {broken} in it does not match")


def name_inside(path: Path) -> str | None:
    """Return the name that a file had when torch.save wrote it, without its suffix. None if the file does not say it.

    torch names the folder in its zip archive after the file, so a file that was renamed or copied still has it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[0] for name in archive.namelist() if name.endswith("/data.pkl")}
    except Exception:  # `load` reports a damaged file
        return None
    return names.pop() if len(names) == 1 and names != {"archive"} else None


def flag_of(path: Path, name: str) -> bool | None:
    """Return a boolean attribute of a pickled object, without loading the pickle. None if unknown."""
    try:
        with zipfile.ZipFile(path) as archive:
            (data,) = [entry for entry in archive.namelist() if entry.endswith("/data.pkl")]
            operations = list(pickletools.genops(archive.read(data)))
    except Exception:  # the file is damaged, or it has another format
        return None
    for at, (_, argument, _) in enumerate(operations):
        if argument == name:
            following = [operation[0].name for operation in operations[at + 1 : at + 4]]
            opcodes = [opcode for opcode in following if not opcode.endswith("PUT") and opcode != "MEMOIZE"]
            return {"NEWTRUE": True, "NEWFALSE": False}.get(opcodes[0]) if opcodes else None
    return None


def _possible(content: Any) -> Any:
    """Return the content of a file. Raises Unreadable if a tensor in it has elements that the file does not have."""
    waiting, num_values = [content], 0
    while waiting and num_values < _MOST_VALUES:
        value = waiting.pop()
        num_values += 1
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, torch.Tensor) and not _is_possible(value):
            raise Unreadable(f"it has a tensor of {value.numel():,} elements, which the file does not contain")
    return content


def _is_possible(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or tensor.is_nested:
        return False
    if tensor.layout is not torch.strided or tensor.numel() < _MOST_REPEATED:
        return True
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


# ---------------------------------------------------------------- the metadata of DCP

_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = {
    (_METADATA, name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint._hf_utils", "_HFStorageInfo"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows only the classes of DCP's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format
        ):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) not in _METADATA_CLASSES:
            raise Refusal(f"{module}.{name}")
        return super().find_class(module, name)


def load_metadata(path: Path, trust: bool) -> Any:
    """Return the content of DCP's file `.metadata`. Raises Unreadable or Refusal, as `load` does."""
    try:
        content = path.read_bytes()
        reader = pickle.Unpickler if trust else _MetadataUnpickler
        return reader(io.BytesIO(content)).load()
    except Refusal as unknown:
        name = printable(str(unknown))
        raise Refusal(
            f"{path}: this file contains the class {name}, which does not belong to the metadata of a checkpoint. "
            "Loading the file could run code. If you trust the file's author as you trust a program, add "
            "--trust-pickle."
        ) from None
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    except Exception as error:  # a damaged pickle may raise anything
        raise Unreadable(f"it is damaged ({type(error).__name__}: {first_line(error)})") from None
