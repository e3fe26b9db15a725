"""Models known by name; any other is found by its config.json, or by its id on the Hugging Face hub."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from study.files import parse_json
from study.theory.shapes.config_json import from_config
from study.theory.shapes.shape import Architecture, ModelShape, plain

# A shape as its config.json on the hub has it, with its ids there.
_Named = tuple[ModelShape, tuple[str, ...]]


def _bert() -> Iterator[_Named]:
    """Devlin et al., arXiv:1810.04805, and its miniatures, Turc et al., arXiv:1908.08962."""
    for size, layers, hidden in (
        ("tiny", 2, 128), ("micro", 4, 128), ("mini", 4, 256), ("small", 4, 512), ("medium", 8, 512),
    ):  # fmt: skip
        heads = hidden // 64
        shape = plain(f"bert-{size}", "bert", layers, hidden, heads, 512, 30522)
        yield shape, (f"google/bert_uncased_L-{layers}_H-{hidden}_A-{heads}",)
    for size, layers, hidden in (("base", 12, 768), ("large", 24, 1024)):
        shape = plain(f"bert-{size}", "bert", layers, hidden, hidden // 64, 512, 30522)
        yield shape, (f"google-bert/bert-{size}-uncased", f"bert-{size}-uncased")


def _gpt() -> Iterator[_Named]:
    for name, layers, hidden, heads in (
        ("gpt2", 12, 768, 12), ("gpt2-medium", 24, 1024, 16), ("gpt2-large", 36, 1280, 20), ("gpt2-xl", 48, 1600, 25),
    ):  # fmt: skip
        yield plain(name, "gpt2", layers, hidden, heads, 1024, 50257), (f"openai-community/{name}",)
    for name, layers, hidden, heads in (
        ("gpt-neo-125m", 12, 768, 12), ("gpt-neo-1.3b", 24, 2048, 16), ("gpt-neo-2.7b", 32, 2560, 20),
    ):  # fmt: skip
        yield plain(name, "gpt-neo", layers, hidden, heads, 2048, 50257), (f"EleutherAI/{name}",)
    yield plain("gpt-j-6b", "gpt-j", 28, 4096, 16, 2048, 50400), ("EleutherAI/gpt-j-6b",)


def _mpt() -> Iterator[_Named]:
    """LLM Foundry's benchmark tables: the parameters they count are those of a GPT-2 with biases, exactly.

    They have as many positions as the sequence has tokens; 2048 in most rows.
    """
    for size, layers, hidden, heads in (
        ("125m", 12, 768, 12), ("350m", 24, 1024, 16), ("760m", 24, 1536, 12), ("1b", 24, 2048, 16),
        ("3b", 32, 2560, 20), ("7b", 32, 4096, 32), ("13b", 40, 5120, 40), ("30b", 48, 7168, 56), ("70b", 80, 8192, 64),
    ):  # fmt: skip
        yield plain(f"mpt-{size}", "gpt2", layers, hidden, heads, 2048, 50368, "gelu"), ()


def _gated(
    name: str, architecture: Architecture, layers: int, hidden: int, heads: int, kv_heads: int, feed_forward: int,
    vocabulary: int, positions: int, *, head_size: int | None = None, tied: bool = False,
) -> ModelShape:  # fmt: skip
    activation = "gelu_pytorch_tanh" if architecture == "gemma2" else "silu"
    head_size = head_size or hidden // heads
    return ModelShape(
        name, architecture, layers, hidden, heads, vocabulary, positions, feed_forward, kv_heads, head_size, tied,
        activation,
    )  # fmt: skip


def _llama_and_mistral() -> Iterator[_Named]:
    for name, layers, hidden, heads, kv_heads, feed_forward, vocabulary, positions, ids in (
        ("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096, ("meta-llama/Llama-2-7b-hf",)),
        ("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096, ("meta-llama/Llama-2-13b-hf",)),
        ("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096, ("meta-llama/Llama-2-70b-hf",)),
        ("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, ("meta-llama/Meta-Llama-3-8B",)),
        ("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, ("meta-llama/Meta-Llama-3-70B",)),
        ("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 131072, ("meta-llama/Llama-3.1-8B",)),
        ("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 131072, ("meta-llama/Llama-3.1-70B",)),
    ):  # fmt: skip
        yield _gated(name, "llama", layers, hidden, heads, kv_heads, feed_forward, vocabulary, positions), ids
    yield _gated("mistral-7b", "mistral", 32, 4096, 32, 8, 14336, 32000, 32768), ("mistralai/Mistral-7B-v0.1",)


def _qwen2() -> Iterator[_Named]:
    for size, layers, hidden, heads, kv_heads, feed_forward, vocabulary in (
        ("0.5b", 24, 896, 14, 2, 4864, 151936), ("1.5b", 28, 1536, 12, 2, 8960, 151936),
        ("7b", 28, 3584, 28, 4, 18944, 152064), ("72b", 80, 8192, 64, 8, 29568, 152064),
    ):  # fmt: skip
        for version in ("2", "2.5"):
            positions = 32768 if (version, size) == ("2.5", "0.5b") else 131072
            shape = _gated(
                f"qwen{version}-{size}", "qwen2", layers, hidden, heads, kv_heads, feed_forward, vocabulary, positions,
                tied=size in ("0.5b", "1.5b"),
            )  # fmt: skip
            yield shape, (f"Qwen/Qwen{version}-{size.upper()}",)


def _gemma2() -> Iterator[_Named]:
    for size, layers, hidden, heads, kv_heads, feed_forward, head_size in (
        ("2b", 26, 2304, 8, 4, 9216, 256), ("9b", 42, 3584, 16, 8, 14336, 256), ("27b", 46, 4608, 32, 16, 36864, 128),
    ):  # fmt: skip
        shape = _gated(
            f"gemma2-{size}", "gemma2", layers, hidden, heads, kv_heads, feed_forward, 256000, 8192,
            head_size=head_size, tied=True,
        )  # fmt: skip
        yield shape, (f"google/gemma-2-{size}", f"gemma-2-{size}")


_NAMED = list(chain(_bert(), _gpt(), _mpt(), _llama_and_mistral(), _qwen2(), _gemma2()))
KNOWN: dict[str, ModelShape] = {shape.name: shape for shape, _ in _NAMED}
_BY_NAME = KNOWN | {hub_id.lower(): shape for shape, ids in _NAMED for hub_id in ids}


LONGEST_PATH = 1024  # beyond what a file system takes, asking it is an error


def find_known(text: str) -> ModelShape | None:
    """Find a model by a known name or hub id, in any case; no file is read, and no hub asked."""
    return _BY_NAME.get(text.strip().lower())


def find(text: str) -> ModelShape:
    """Find a model by a known name or hub id, in any case, by a config.json or its folder, or on the hub.

    The hub is asked, through transformers, only for an id that is not known here. Raises ValueError with the remedy.
    """
    if known := find_known(text):
        return known
    if not text.strip():
        raise ValueError("the name is empty; give a known name, a config.json or a hub id, owner/name")
    path = Path(text if len(text) < LONGEST_PATH else "\0")  # no file can have that name
    if (path / "config.json").is_file():
        return _from_file(path / "config.json")
    if text.endswith(".json") or path.is_file():
        return _from_file(path)
    if path.is_dir():
        raise ValueError(f"{text}: a folder without a config.json; add one, or give a known name or a hub id")
    owner, slash, name = text.partition("/")
    if slash and owner and name and "/" not in name and " " not in text:
        return _from_hub(text)
    near = list(dict.fromkeys(_BY_NAME[n].name for n in difflib.get_close_matches(text.lower(), _BY_NAME, n=3)))
    hint = f"near are {', '.join(near)}" if near else f"known are {', '.join(KNOWN)}"
    raise ValueError(f"unknown model {text!r}: {hint}; give one, a config.json or a hub id, owner/name")


def _from_file(path: Path) -> ModelShape:
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the path of a transformers config.json") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{path}: not JSON ({error}); give the path of a transformers config.json") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: no JSON object; give the path of a transformers config.json")
    return from_config(content, str(path))


def _from_hub(hub_id: str) -> ModelShape:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(
            f"{hub_id}: the hub is asked through transformers, which is not installed; run: pip install "
            "'zero-study[train]', or give a config.json"
        ) from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it says each of its retries
    try:
        content = AutoConfig.from_pretrained(hub_id).to_dict()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{hub_id}: not read from the hub ({reason}); give a config.json") from None
    return from_config(content, hub_id)
