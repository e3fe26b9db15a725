"""The form of the planner's web page."""

from __future__ import annotations

import re
from typing import Any

from launching import ROOT

PAGE = (ROOT / "docs" / "web" / "choose.md").read_text(encoding="utf-8")
# The label of each field, by the option of the command.
LABELS = {
    name: label
    for label, name in re.findall(r'<label[^>]*>([^<\n]+)\n<\w+ id="([a-z0-9-]+)"', PAGE)
    if name != "config"
}


def wait_for_answer(page: Any, before: str) -> None:
    """Wait until the page shows another answer than the one with this number."""
    page.wait_for_function(f"(document.getElementById('status').dataset.number ?? '') !== '{before}'", timeout=60_000)
