"""What every test shares: marks that skip where there are fewer GPUs than a test needs."""

from __future__ import annotations

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    import torch

    needed, found = mark.args[0] if mark.args else 1, torch.cuda.device_count()
    if found < needed:
        pytest.skip(f"needs {needed} GPU{'s' if needed > 1 else ''}, found {found}")
