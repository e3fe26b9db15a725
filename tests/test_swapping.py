"""Is a gradient that lies on a disk read, wherever its slice of the buffer begins?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from study.training import swapping

OFFSET, LENGTH = 192, 512  # of the second gradient: its slice begins off every 512 bytes


class Handle:
    """A disk that reads into memory aligned to 512 bytes, and through a buffer into what is not locked."""

    def __init__(self, locked: torch.Tensor) -> None:
        self.start, self.end = locked.data_ptr(), locked.data_ptr() + locked.nbytes
        self.asked = 0

    def has_buffers(self) -> bool:
        return True

    def swap_out_tensors(self, tensor_list: list[torch.Tensor], path_list: list[str]) -> None:
        for tensor, path in zip(tensor_list, path_list, strict=True):
            tensor.numpy().tofile(path)

    def async_pread(self, into: torch.Tensor, path: str, _: int) -> int:
        self.asked += 1
        if not self.is_pinned(into) or (into.data_ptr() - self.start) % 512 == 0:
            into.copy_(torch.from_numpy(np.fromfile(path, dtype=np.float32)))
        return 0

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        return self.start <= buffer.data_ptr() < self.end

    def wait(self) -> int:
        done, self.asked = self.asked, 0
        return done


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_gradient_is_read_wherever_it_begins(tmp_path, monkeypatch, is_mended):
    """Through what both of DeepSpeed's swappers share: what is swapped out, and read back into one buffer."""
    utils = pytest.importorskip("deepspeed.runtime.swap_tensor.optimizer_utils")
    kind = pytest.importorskip(
        "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper"
    ).PartitionedOptimizerSwapper
    cut = utils.OptimizerSwapper._adjust_for_misaligned_lengths
    monkeypatch.setattr(utils.OptimizerSwapper, "_adjust_for_misaligned_lengths", cut)
    if is_mended:
        swapping.cut_where_a_disk_reads()
    parameter, buffer = torch.nn.Parameter(torch.zeros(OFFSET + LENGTH)), torch.zeros(OFFSET + LENGTH)
    parameter.ds_id = "0"
    handle = Handle(buffer)
    info = utils.OptimizerStateSwapInfo(parameter, parameter.numel(), str(tmp_path), handle)
    swapper = kind.__new__(kind)
    known = {"swap_element_size": 4, "min_aio_bytes": 1024, "numel_alignment": 256, "swap_params_info": {"0": info}}
    vars(swapper).update(known, aio_handle=handle, timers=None, timer_names=set())
    gradients = [torch.rand(OFFSET), torch.rand(LENGTH)]
    swapper._swap_out_gradients(parameter, [0, OFFSET], gradients, handle)
    swapper._swap_in_gradients(handle, parameter, buffer)
    assert torch.equal(buffer[:OFFSET], gradients[0])
    assert torch.equal(buffer[OFFSET:], gradients[1]) == is_mended
