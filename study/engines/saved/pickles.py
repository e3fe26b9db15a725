"""Load files that torch.save wrote, without running code that is in them.

A pickle can run any code when it is loaded. torch loads tensors and plain data without that risk. The classes of
DeepSpeed that are in every one of its checkpoints are replaced by classes without behavior.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import Refusal

# What torch says of a class or function that is neither a tensor's nor plain data.
_NEEDED = re.compile(r"(?i)unsupported (?:global: )?(?:GLOBAL|class) (\S+)|unrecognized function (.+)|Can only build")


class Unreadable(Exception):
    """Raised for a file that is damaged."""


class Plain:
    """A stand-in for a class of DeepSpeed. It keeps the attributes, and has no methods."""


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


def load_bytes(content: bytes, name: str, trust: bool) -> Any:
    """Return the content of bytes that torch.save wrote. See `load`."""
    return _load(io.BytesIO(content), name, lambda source, **options: torch.load(source, **options), trust)


def _load(source: Any, name: str, read: Callable[..., Any], trust: bool) -> Any:
    options: dict[str, Any] = {"map_location": "cpu"}
    if isinstance(source, Path) and zipfile.is_zipfile(source):
        options["mmap"] = True
    try:
        with torch.serialization.safe_globals([*_STAND_INS, *_plain_numpy()]):
            return read(source, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        needed = _NEEDED.search(str(error))
        if needed is None:
            raise Unreadable("it has no content that torch can read") from None
        if not trust:
            raise Refusal(
                f"{name}: this file has other content than tensors and plain data ({needed[1] or needed[0]}), and "
                "loading it would run code that is in it. If you trust its author as you trust a program, add "
                "--trust-pickle."
            ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        raise Unreadable(_first_line(error)) from None
    try:
        return read(source, weights_only=False, **options)
    except Exception as error:  # a pickle may raise anything
        raise Unreadable(f"loading it raises {type(error).__name__}: {_first_line(error)}") from None


def check_sums(path: Path) -> None:
    """Raise Unreadable if a file of torch.save is cut off, or if a checksum in it does not match."""
    if not path.is_file():
        raise Unreadable("there is no such file")
    if not path.stat().st_size:
        raise Unreadable("it is empty")
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    if not is_zip:
        return  # the format before torch 1.6, which has no checksums
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise Unreadable(f"it is cut off or damaged ({_first_line(error)})") from None
    if broken is not None:
        raise Unreadable(f"it is damaged: the checksum of {broken} in it does not match")


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
        raise Refusal(
            f"{path}: this file has another class than the metadata of a checkpoint has ({unknown}), and loading it "
            "could run code. If you trust its author as you trust a program, add --trust-pickle."
        ) from None
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    except Exception as error:  # a damaged pickle may raise anything
        raise Unreadable(f"it is damaged ({type(error).__name__}: {_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:160] if lines else type(error).__name__
