"""Is a gradient that lies on a disk read, wherever its slice of the buffer begins?"""

from __future__ import annotations

from types import SimpleNamespace

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

    def async_pread(self, into: torch.Tensor, path: str, _: int) -> int:
        self.asked += 1
        is_locked = self.start <= into.data_ptr() < self.end
        if not is_locked or (into.data_ptr() - self.start) % 512 == 0:
            into.copy_(torch.from_numpy(np.fromfile(path, dtype=np.float32)))
        return 0

    def wait(self) -> int:
        done, self.asked = self.asked, 0
        return done


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_gradient_is_read_wherever_it_begins(tmp_path, monkeypatch, is_mended):
    swapper = pytest.importorskip("deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper")
    kind = swapper.PartitionedOptimizerSwapper
    monkeypatch.setattr(kind, "_swap_in_pinned_gradients", kind._swap_in_pinned_gradients)
    if is_mended:
        swapping.read_every_gradient()
    gradients = {0: torch.rand(OFFSET), OFFSET: torch.rand(LENGTH)}
    swapped = {}
    for offset, gradient in gradients.items():
        gradient.numpy().tofile(tmp_path / str(offset))
        swapped[offset] = SimpleNamespace(path=str(tmp_path / str(offset)), offset=offset, length=len(gradient))
    info, nothing = SimpleNamespace(swapped_gradients=swapped), lambda *_: None
    engine = SimpleNamespace(
        swap_params_info={"0": info}, _start_timer=nothing, _stop_timer=nothing, _log_timers=nothing
    )
    buffer = torch.zeros(OFFSET + LENGTH)
    kind._swap_in_pinned_gradients(engine, Handle(buffer), SimpleNamespace(ds_id="0"), buffer)
    assert torch.equal(buffer[:OFFSET], gradients[0])
    assert torch.equal(buffer[OFFSET:], gradients[OFFSET]) == is_mended
