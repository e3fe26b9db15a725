"""What is said where something is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zero_study.errors import Refusal


def refusal(ask: Callable[..., Any], *given: Any, **named: Any) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(Refusal) as caught:
        ask(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)
