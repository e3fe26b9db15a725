"""Mask tokens and passwords in quoted lines, because users paste answers into public threads."""

from __future__ import annotations

import re

# A number after "token", as in max_tokens: 9, is no secret.
_NAMES = r"(?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|pwd|credential|token(?!s?[\"']?\s*[=:]?\s*\d+\b))s?"
_SECRETS = (
    re.compile(r"\b(hf_|sk-(?:ant-|proj-)?|gh[opsu]_|github_pat_|glpat-|xox[abps]-|AKIA|wandb_v1_)[\w\-]{8,}"),
    # A flag such as --password, or a variable: its value may be short.
    re.compile(rf"(?i)((?:--?[\w-]*{_NAMES}(?:\s+|=)|\b\w*{_NAMES}[\"']?\s*[=:]\s*)[\"']?)(?![\s\"'])[^\s\"',;)}}\]]+"),
    re.compile(r"(?i)(://[^/\s:@]+:)[^@\s/]+(?=@)"),
    re.compile(r"(?i)(bearer\s+)[\w\-.]{12,}"),
)


def mask(text: str) -> str:
    """Return a text without tokens and passwords."""
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***", text)
    return text
