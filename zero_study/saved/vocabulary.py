"""Check that a model has an embedding for each token of its tokenizer and of its settings for generation."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from ..verdict import Checked
from . import expected
from .content import Saved, names_text

_TOKENIZER, _SETTINGS, _GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_ID = re.compile(r"(?:\w+_)?token_ids?|suppress_tokens|begin_suppress_tokens")
# Placeholders of images and sounds, whose embeddings another part of the model computes.
_PLACEHOLDER = re.compile(r"(?i)image|vision|audio|video|speech|soft_token|patch")


def check(folder: Path, saved: Saved, num_tokens: int | None, config: dict[str, Any]) -> None:
    """Report tokens for which the embedding has no row. `num_tokens` is None if the model has no tokens."""
    if num_tokens is None:
        return
    tokens = _tokens(folder)
    without = {name: number for name, number in tokens.items() if number >= num_tokens}
    placeholders = {name for name in without if _PLACEHOLDER.search(name)}
    listed = names_text(f"{name} = {number}" for name, number in without.items())
    if without.keys() - placeholders:
        saved.wrong(
            "partial",
            f"The tokenizer has {len(without):,} tokens that have no embedding ({listed}), because the embedding has "
            f"{num_tokens:,} rows. The model fails on these tokens. Call resize_token_embeddings after adding tokens.",
            [_TOKENIZER],
        )
    elif without:
        saved.note("partial", f"These tokens of the tokenizer have no embedding ({listed}).", [_TOKENIZER])
    if tokens:
        saved.checked.append(Checked(len(tokens), "token", "compared with the embedding"))
    _check_settings(folder, saved, num_tokens, config, bool(tokens))
    _check_end(folder, saved, config, tokens)


def _tokens(folder: Path) -> dict[str, int]:
    """Return the tokens in the files of a tokenizer that are JSON, with their numbers. None are known of others."""
    content = _read(folder / _TOKENIZER)
    model = content.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    tokens: dict[str, int] = {}
    if isinstance(words, dict):
        tokens = {name: number for name, number in words.items() if isinstance(number, int)}
    elif isinstance(words, list):  # of Unigram: each is a pair of a token and its score
        tokens = {str(entry[0]): at for at, entry in enumerate(words) if isinstance(entry, list) and entry}
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            tokens[str(entry.get("content"))] = entry["id"]
    listed = _read(folder / _SETTINGS).get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        if number.isdecimal() and len(number) < 10 and isinstance(entry, dict):
            tokens[str(entry.get("content"))] = int(number)
    for name in ("added_tokens.json", "vocab.json"):
        more = _read(folder / name).items()
        tokens |= {token: number for token, number in more if type(number) is int and number >= 0}
    return tokens


def _check_end(folder: Path, saved: Saved, config: dict[str, Any], tokens: dict[str, int]) -> None:
    """Report a tokenizer whose token for the end of a text is none of those at which the model stops."""
    token = _read(folder / _SETTINGS).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    number = tokens.get(token) if isinstance(token, str) else None
    ends: list[Any] = []
    for settings in (_read(folder / _GENERATION), config):
        value = settings.get("eos_token_id")
        ends += value if isinstance(value, list) else [value] if value is not None else []
    if number is not None and ends and number not in ends:
        saved.wrong(
            "different", f"{_SETTINGS} ends a text with {token} = {number}, but the model stops at "
            f"{names_text(map(str, ends))}, so a generation does not end where the training data did.", [_SETTINGS],
        )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def check_numbers(saved: Saved, config: dict[str, Any]) -> None:
    """Report token ids outside the vocabulary in the settings of a model that transformers could not build.

    Such an id may be the reason. Nothing is checked if transformers does not know the model.
    """
    size = config.get("vocab_size")
    with contextlib.suppress(expected.NotKnown):
        expected.class_of(config)
        if isinstance(size, int) and saved.config is not None:
            _check_settings(saved.folder, saved, size, config, False)


def _check_settings(folder: Path, saved: Saved, num_tokens: int, config: dict[str, Any], has_tokenizer: bool) -> None:
    """Check the token ids in generation_config.json. Without that file, check those in config.json."""
    settings = _read(folder / _GENERATION)
    file = _GENERATION if settings else "config.json"
    if not settings and not (folder / file).is_file():
        return
    defaults = {} if has_tokenizer else _defaults(config)
    outside = [
        f"{key} = {number}"
        for key, value in (settings or config).items()
        if _ID.fullmatch(key) and not _PLACEHOLDER.search(key)
        for number in (value if isinstance(value, list) else [value])
        if type(number) is int and number >= num_tokens and number != defaults.get(key)
    ]
    if outside:
        saved.wrong(
            "partial",
            f"{file} names tokens that the model does not have ({names_text(outside)}), because it has "
            f"{num_tokens:,} tokens. Generation fails on such a token, or does not stop at it.",
            [file],
        )


def _defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens that a class of models has by default, which a model of other tokens may carry along."""
    with contextlib.suppress(Exception):
        import transformers

        return dict(transformers.CONFIG_MAPPING[config["model_type"]]().to_dict())
    return {}
