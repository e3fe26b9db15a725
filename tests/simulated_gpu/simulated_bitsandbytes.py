"""Stand-ins that let bitsandbytes run its CUDA code for weights in 4 bits (NF4) on simulated GPUs.

bitsandbytes chooses an operator's kernel by the device of its tensors, which are on the CPU here. `register_kernel`
therefore registers a choice between its kernels. The CUDA kernels' Python code runs as it is, and the functions of the
CUDA library that they call are in `CudaLibrary`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import simulated_torch
import torch
from simulated_memory import gpu_of
from torch import library as operators

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NF4 = 2  # bitsandbytes's number for the data type
_NESTED_BLOCKSIZE = 256  # elements that share a scale of the scales

_kernels: dict[tuple[str, str], Callable[..., Any]] = {}  # by operator and kind of device


def register_kernel(operator: str, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Stand for torch's decorator of this name: keep CUDA kernels, and choose one at each call."""

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        _kernels[operator, device] = kernel
        if device != "cuda":
            operators.register_kernel(operator, device, partial(_run, operator, device))
        return kernel

    return register


def _run(operator: str, device: str, *args: Any, **options: Any) -> Any:
    """Run an operator's CUDA kernel if its tensors are on a simulated GPU, otherwise the kernel of the device."""
    on_gpu = any(gpu_of(value) is not None for value in args if isinstance(value, torch.Tensor))
    if not on_gpu or (operator, "cuda") not in _kernels:
        return _kernels[operator, device](*args, **options)
    with simulated_torch.within_kernel():
        return _kernels[operator, "cuda"](*args, **options)


class CudaLibrary:
    """The functions of bitsandbytes's CUDA library that NF4 needs, computed by kernels for the CPU.

    They take addresses of memory, as the functions of the library do. Everything else is what the CPU's library has.
    """

    def __init__(self, cpu_library: Any) -> None:
        self._cpu_library = cpu_library
        for name, dtype in _TYPES.items():
            functions = {
                f"cquantize_blockwise_{name}": _quantize,
                f"cdequantize_blockwise_{name}": _dequantize,
                f"cquantize_blockwise_{name}_nf4": _quantize_4bit,
                f"cdequantize_blockwise_{name}_nf4": _dequantize_4bit,
                f"cgemm_4bit_{name}": _multiply_4bit,
            }
            for of_library, function in functions.items():
                setattr(self, of_library, _Function(partial(function, dtype)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cpu_library, name)


class _Function:
    """A function of a library, which has the attributes that ctypes reads, and counts its calls."""

    argtypes: Any = None
    restype: Any = None

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call
        self.num_calls = 0

    def __call__(self, *args: Any) -> None:
        assert len(args) == len(self.argtypes)
        self.num_calls += 1
        with simulated_torch.on_the_host():
            self._call(*args)


def _tensor(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements that are at an address."""
    buffer = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


def _quantize(dtype: torch.dtype, code: int, values: int, scales: int, result: int, blocksize: int, size: int) -> None:
    quantized = _kernels["bitsandbytes::quantize_blockwise", "cpu"](
        _tensor(values, size, dtype), _tensor(code, 256, torch.float32), blocksize
    )
    _write(quantized, result, scales)


def _quantize_4bit(
    dtype: torch.dtype, code: None, values: int, scales: int, result: int, blocksize: int, size: int
) -> None:
    kernel = _kernels["bitsandbytes::quantize_4bit", "default"]
    _write(kernel(_tensor(values, size, dtype), blocksize, "nf4", torch.uint8), result, scales)


def _write(quantized: tuple[torch.Tensor, torch.Tensor], result: int, scales: int) -> None:
    for address, tensor in zip((result, scales), quantized, strict=True):
        _tensor(address, tensor.numel(), tensor.dtype).copy_(tensor.flatten())


def _dequantize(
    dtype: torch.dtype, code: int, values: int, scales: int, result: int, blocksize: int, size: int, stream: int
) -> None:
    quantized, blocks = _tensor(values, size, torch.uint8), _tensor(scales, -(-size // blocksize), torch.float32)
    kernel = _kernels["bitsandbytes::dequantize_blockwise", "cpu"]
    _tensor(result, size, dtype).copy_(kernel(quantized, blocks, _tensor(code, 256, torch.float32), blocksize, dtype))


def _dequantize_4bit(
    dtype: torch.dtype, code: None, values: int, scales: int, result: int, blocksize: int, size: int, stream: int
) -> None:
    quantized = _tensor(values, -(-size // 2), torch.uint8)
    blocks = _tensor(scales, -(-size // blocksize), torch.float32)
    kernel = _kernels["bitsandbytes::dequantize_4bit", "cpu"]
    _tensor(result, size, dtype).copy_(kernel(quantized, blocks, blocksize, "nf4", (1, size), dtype).flatten())


def _multiply_4bit(
    dtype: torch.dtype, inputs: int, weights: int, scales: int, quantized_scales: int | None, code: int | None,
    offset: int | None, result: int, bias: int | None, rows: int, outputs: int, columns: int, blocksize: int,
    data_type: int, stream: int,
) -> None:  # fmt: skip
    assert data_type == _NF4
    size = outputs * columns
    blocks = -(-size // blocksize)
    nested: list[torch.Tensor | None] = [None, None, None]
    if quantized_scales and code and offset:
        nested = [
            _tensor(quantized_scales, blocks, torch.uint8),
            _tensor(code, 256, torch.float32),
            _tensor(offset, 1, torch.float32),
        ]
    num_scales = -(-blocks // _NESTED_BLOCKSIZE) if quantized_scales else blocks
    product = _kernels["bitsandbytes::gemm_4bit", "default"](
        _tensor(inputs, rows * columns, dtype).view(rows, columns),
        _tensor(weights, -(-size // 2), torch.uint8).view(-1, 1),
        (outputs, columns),
        _tensor(scales, num_scales, torch.float32),
        blocksize,
        "nf4",
        _tensor(bias, outputs, dtype) if bias else None,
        *nested,
    )
    _tensor(result, rows * outputs, dtype).copy_(product.flatten())


# What replaces parts of bitsandbytes's modules as soon as they have been imported.


def choose_kernels(of_bitsandbytes: ModuleType) -> None:
    """Let bitsandbytes._ops register a choice between kernels."""
    of_bitsandbytes.register_kernel = register_kernel  # type: ignore[attr-defined]


def load_cpu_library(specs: ModuleType) -> None:
    """Let bitsandbytes.cuda_specs name no CUDA, so that the library for the CPU is loaded."""
    specs.get_cuda_specs = lambda: None  # type: ignore[attr-defined]


def add_cuda_library(extension: ModuleType) -> None:
    """Let bitsandbytes.cextension have the functions of the CUDA library too."""
    extension.lib = CudaLibrary(extension.lib)  # type: ignore[attr-defined]
