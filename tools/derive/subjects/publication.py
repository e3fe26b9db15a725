"""Sentences that depend on whether the project has a public address."""

from __future__ import annotations

from collections.abc import Callable

import address

TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "clone"): address.clone_line,
    ("docs/gpus.md", "colab"): address.colab_sentence,
    ("docs/doctor.md", "pre_commit"): address.pre_commit_block,
}
