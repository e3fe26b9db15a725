"""Where do text and tokenizer come from? The hub, a folder of files, or a synthetic sample made here by code.

One source is never replaced by another: what cannot be had from the source that was asked for is a `Refusal`.
Importing this module and calling `check` import neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from study.config import RunConfig
from study.errors import Refusal

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

HUB_DATA = {"bert-imdb": ("stanfordnlp/imdb",), "gpt-wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1")}
HUB_TOKENIZER = {"bert-imdb": "google-bert/bert-large-uncased", "gpt-wikitext": "openai-community/gpt2"}
# Paths inside the data folder.
FILES_DATA = {
    "bert-imdb": ("imdb/train.parquet",),
    "gpt-wikitext": ("wikitext-2/train.txt", "wikitext-2/validation.txt"),
}
FILES_TOKENIZER = {"bert-imdb": "tokenizers/bert-large-uncased", "gpt-wikitext": "tokenizers/gpt2"}
# Both: without the second, transformers makes a tokenizer with an empty vocabulary and says nothing.
TOKENIZER_PARTS = ("tokenizer_config.json", "tokenizer.json")

# Models that transformers has without SDPA, by workload and size; asked of transformers itself only by a test.
WITHOUT_SDPA = {("gpt-wikitext", "2.7b"): "GPTNeoForCausalLM", ("gpt-wikitext", "6b"): "GPTJForCausalLM"}

HELD_OUT = 0.2  # of the labelled training reviews
HUB_PROBE_SECONDS = 5.0

# The synthetic sample.
VOCABULARY = 8192  # entries of its tokenizers: an embedding large enough for NVMe offload to swap, even of a tiny model
NUM_WORDS = 8000
NUM_REVIEWS = 2000
NUM_SENTIMENT_WORDS = 8  # of each kind
TEXT_WORDS = {"train": 160_000, "validation": 24_000}
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GPT_SPECIAL = "<|endoftext|>"


class Examples:
    """A map-style dataset of equally long examples: item i is {name: tensor[i]}."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors["input_ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The examples of one run, and what building its model needs to know of them."""

    train: Examples
    evaluation: Examples
    vocab_size: int  # rows of the embedding
    pad_token_id: int
    description: dict[str, Any]  # for the record


# ---------------------------------------------------------------- before anything is launched


def check(config: RunConfig) -> None:
    """Refuse, in one line, a model that the workload cannot build, and data that is not there or not enough.

    Costs milliseconds; the hub is not asked.
    """
    name = WITHOUT_SDPA.get((config.workload, config.size))
    if config.attention == "sdpa" and name:
        raise Refusal(f"{name} ({config.size}) has no SDPA in transformers; use --attention eager")
    if config.data == "files":
        _check_folder(config)
        if config.workload == "bert-imdb":
            _check_parquet(config)
        else:
            _check_texts(config)
    elif config.data == "bundled":
        if config.workload == "bert-imdb":
            require_reviews(config, NUM_REVIEWS, "the bundled sample")
        else:
            for split, words in TEXT_WORDS.items():
                require_blocks(config, split, words // config.sequence_length, "the bundled sample")


def require_reviews(config: RunConfig, num_reviews: int, where: str) -> None:
    """Refuse more examples than the two parts of the labelled reviews hold."""
    num_held_out = math.ceil(HELD_OUT * num_reviews)  # as datasets' train_test_split rounds
    for name, asked, available, part in (
        ("num_train_examples", config.num_train_examples, num_reviews - num_held_out, "80 %"),
        ("num_eval_examples", config.num_eval_examples, num_held_out, "20 %"),
    ):
        if asked > available:
            raise Refusal(
                f"{name} {asked} is more than the {available} reviews ({part} of {num_reviews}) in {where}; lower "
                f"--{name.replace('_', '-')}"
            )


def require_blocks(config: RunConfig, split: str, available: int, where: str) -> None:
    """Refuse more examples than the text has blocks. `split` is "train" or "validation"."""
    name = {"train": "num_train_examples", "validation": "num_eval_examples"}[split]
    asked = getattr(config, name)
    if asked > available:
        raise Refusal(
            f"{name} {asked} is more than the {available} {split} blocks of {config.sequence_length} tokens in "
            f"{where}; lower --{name.replace('_', '-')} or --sequence-length"
        )


def _check_folder(config: RunConfig) -> None:
    folder = _data_dir(config)
    needed = [*FILES_DATA[config.workload], *(f"{FILES_TOKENIZER[config.workload]}/{part}" for part in TOKENIZER_PARTS)]
    try:
        if not folder.exists():
            raise Refusal(f"data_dir {folder} does not exist; give --data-dir a folder with {', '.join(needed)}")
        if not folder.is_dir():
            raise Refusal(f"data_dir {folder} is not a folder; give --data-dir a folder with {', '.join(needed)}")
        if not any(folder.iterdir()):
            raise Refusal(f"data_dir {folder} is empty; it needs {', '.join(needed)}; correct --data-dir")
        missing = [name for name in needed if not (folder / name).is_file()]
        if missing:
            raise Refusal(
                f"data_dir {folder} lacks {', '.join(missing)}, which {config.workload} needs; add them or correct "
                "--data-dir"
            )
        for name in needed:
            with (folder / name).open("rb") as file:
                file.read(1)
    except OSError as error:
        raise _unreadable(error.filename or folder, error) from error


def _data_dir(config: RunConfig) -> Path:
    assert config.data_dir is not None  # RunConfig sees to it
    return config.data_dir


def _unreadable(path: Path | str, error: Exception) -> Refusal:
    return Refusal(f"cannot read {path} ({_first_line(error)}); mend it or correct --data-dir")


def _check_parquet(config: RunConfig) -> None:
    import pyarrow
    import pyarrow.parquet
    from pyarrow import types

    (name,) = FILES_DATA[config.workload]
    path = _data_dir(config) / name
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except pyarrow.ArrowInvalid as error:
        raise Refusal(f"{path} is not a parquet file; replace it or correct --data-dir") from error
    missing = [column for column in ("text", "label") if column not in schema.names]
    if missing:
        raise Refusal(
            f"{path} has no column {' and no column '.join(missing)}, only {', '.join(schema.names)}; rename its "
            "columns or correct --data-dir"
        )
    text, label = schema.field("text").type, schema.field("label").type
    if not (types.is_string(text) or types.is_large_string(text)) or not types.is_integer(label):
        raise Refusal(
            f"{path} has text as {text} and label as {label}; it needs text as string and label as an integer"
        )
    require_reviews(config, num_rows, str(path))


def _check_texts(config: RunConfig) -> None:
    for name in FILES_DATA[config.workload]:
        path = _data_dir(config) / name
        with path.open("rb") as file:
            if not any(line.strip() for line in file):
                raise Refusal(f"{path} holds no text; replace it or correct --data-dir")
        # A token takes at least one byte, so this only refuses what is hopeless; `load` counts the tokens.
        require_blocks(config, path.stem, path.stat().st_size // config.sequence_length, str(path))


# ---------------------------------------------------------------- what the workloads load


def load_reviews(config: RunConfig) -> datasets.Dataset:
    """Load all labelled training reviews, in their original order: columns text and label (0 negative, 1 positive)."""
    import datasets

    if config.data == "hub":
        (name,) = HUB_DATA["bert-imdb"]
        reviews = from_hub(f"dataset {name}", lambda: datasets.load_dataset(name, split="train"))
        return reviews.select_columns(["text", "label"])
    if config.data == "bundled":
        texts, labels = synthetic_reviews()
        return datasets.Dataset.from_dict({"text": texts, "label": labels})

    import pyarrow
    import pyarrow.parquet

    path = _data_dir(config) / FILES_DATA["bert-imdb"][0]
    try:
        # In memory: datasets' own readers write a copy into a cache.
        table = pyarrow.parquet.ParquetFile(path).read(columns=["text", "label"])
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error
    labels = set(table["label"].unique().to_pylist())
    if table["text"].null_count or not labels <= {0, 1}:
        raise Refusal(
            f"{path} has {table['text'].null_count} reviews without text and the labels {sorted(labels, key=str)}; "
            "every review needs a text and label 0 or 1"
        )
    return datasets.Dataset(table)


def load_articles(config: RunConfig) -> dict[str, list[str]]:
    """Load the lines of WikiText-2 as the hub has them, newline kept and a blank line as "": train and validation."""
    if config.data == "hub":
        import datasets

        name, variant = HUB_DATA["gpt-wikitext"]
        articles = from_hub(f"dataset {name} {variant}", lambda: datasets.load_dataset(name, variant))
        return {split: list(articles[split]["text"]) for split in ("train", "validation")}
    if config.data == "bundled":
        return synthetic_articles()
    return {Path(name).stem: _read_lines(_data_dir(config) / name) for name in FILES_DATA["gpt-wikitext"]}


def _read_lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            return [line.removesuffix("\n") + "\n" if line.strip() else "" for line in file]
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not UTF-8 text (byte {error.start}); convert it or correct --data-dir") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the workload; GPT's pads with its end of text."""
    from transformers import AutoTokenizer

    if config.data == "bundled":
        tokenizer = synthetic_tokenizer(config.workload)
    elif config.data == "hub":
        name = HUB_TOKENIZER[config.workload]
        tokenizer = from_hub(f"tokenizer {name}", lambda: AutoTokenizer.from_pretrained(name))
    else:
        folder = _data_dir(config) / FILES_TOKENIZER[config.workload]
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever a damaged file makes tokenizers and transformers raise
            raise Refusal(
                f"{folder} holds no usable tokenizer ({_first_line(error)}); replace it or correct --data-dir"
            ) from error
    if config.workload == "gpt-wikitext":
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise Refusal(
            f"the tokenizer of --data {config.data} is no tokenizer for {config.workload}: it has no padding or end "
            "token"
        )
    return tokenizer


def from_hub(
    what: str, load: Callable[[], T], remedy: str = "use --data files --data-dir FOLDER or --data bundled"
) -> T:
    """Return `load()`; whatever the network, the hub and its cache are to blame for is a Refusal with `remedy`.

    One request without retries goes first, because the libraries retry for 20 to 50 seconds where there is no network.
    With HF_HUB_OFFLINE=1 there is none, and what an earlier run left in the hub's cache is used.
    """
    try:
        _probe_hub()
        return load()
    except _hub_failures() as error:
        raise Refusal(
            f"cannot reach the hub for {what}, or it did not deliver ({_first_line(error)}); {remedy}"
        ) from error


def _hub_failures() -> tuple[type[Exception], ...]:
    """What the libraries raise for the network, the hub and its cache; a bug, or memory that ran out, is none of it."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    # huggingface_hub's errors have no base in common, and httpx's are no OSError.
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return OSError, ValueError, httpx.HTTPError, DatasetsError, *(k for k in kinds if k.__module__ == errors.__name__)


def _probe_hub() -> None:
    from huggingface_hub import constants, get_session, is_offline_mode

    if not is_offline_mode():
        get_session().head(constants.ENDPOINT, timeout=HUB_PROBE_SECONDS)


def _first_line(error: Exception) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


# ---------------------------------------------------------------- for the record


def describe(config: RunConfig, splits: dict[str, Examples], **more: Any) -> dict[str, Any]:
    """Say what was trained on: the source by name, counts, and a digest of every token and label."""
    if config.data == "hub":
        names = {"text": list(HUB_DATA[config.workload]), "tokenizer": HUB_TOKENIZER[config.workload]}
    elif config.data == "files":
        names = {"text": list(FILES_DATA[config.workload]), "tokenizer": FILES_TOKENIZER[config.workload]}
    else:
        names = {"text": ["synthetic"], "tokenizer": "synthetic"}
    counts = {f"num_{split}_examples": len(examples) for split, examples in splits.items()}
    return {"source": config.data, **names, **counts, **more, "digest": digest(*splits.values())}


def digest(*parts: Examples) -> str:
    """SHA-256 of the token ids and labels of the parts, in order, with their shapes."""
    total = hashlib.sha256()
    for part in parts:
        for name in ("input_ids", "labels"):
            array = part.tensors[name].numpy().astype("<i8", order="C")
            total.update(json.dumps([name, array.shape]).encode())
            total.update(array.tobytes())
    return total.hexdigest()


# ---------------------------------------------------------------- the synthetic sample


def _random(seed: int) -> np.random.RandomState:
    import numpy as np

    return np.random.RandomState(seed)  # the one generator of numpy whose numbers never change between versions


@cache
def synthetic_words() -> tuple[str, ...]:
    """Make 8,000 pseudo-words of two or three syllables, short ones first, as frequent words are in a language."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    short = [a + b for a in syllables for b in syllables]
    long = [a + b + c for a in syllables for b in syllables for c in syllables[::7]]
    words = [pool[i] for seed, pool in enumerate((short, long)) for i in _random(seed).permutation(len(pool))]
    return tuple(words[:NUM_WORDS])


def _zipf(num_words: int) -> np.ndarray:
    """Cumulative frequencies of words by rank, after Zipf and Mandelbrot."""
    import numpy as np

    frequencies = 1.0 / (np.arange(num_words) + 2.7)
    return np.cumsum(frequencies / frequencies.sum())


@cache
def synthetic_reviews() -> tuple[list[str], list[int]]:
    """Make reviews of pseudo-words, sorted by label as IMDB's are. Not language: only a tiny model's homework.

    Four words in ten carry sentiment, and nine in ten of those that of the label; the rest are drawn by frequency. So
    BERT tiny is well above chance after 30 steps of 8 reviews at learning rate 1e-3; with less, it still guesses.
    """
    import numpy as np

    words = np.array(synthetic_words())
    sentiment = words[: 2 * NUM_SENTIMENT_WORDS].reshape(2, -1)  # row 0 negative, row 1 positive
    neutral = words[2 * NUM_SENTIMENT_WORDS :]
    random = _random(2)
    labels = np.arange(NUM_REVIEWS) * 2 // NUM_REVIEWS
    lengths = random.randint(30, 91, size=NUM_REVIEWS)
    label_of_word = np.repeat(labels, lengths)
    size = len(label_of_word)
    agrees = random.random_sample(size) < 0.9
    kind = np.where(agrees, label_of_word, 1 - label_of_word)
    chosen = np.where(
        random.random_sample(size) < 0.4,
        sentiment[kind, random.randint(NUM_SENTIMENT_WORDS, size=size)],
        neutral[
            np.searchsorted(_zipf(len(neutral)), random.random_sample(size), side="right").clip(max=len(neutral) - 1)
        ],
    ).tolist()
    ends = np.cumsum(lengths).tolist()
    return [
        " ".join(chosen[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)
    ], labels.tolist()


@cache
def synthetic_articles() -> dict[str, list[str]]:
    """Make text by a Markov chain over pseudo-words: each has four successors, themselves drawn by frequency.

    So a model can learn frequencies at once and successions with time. Lines of 100 words, in the hub's form.
    """
    import numpy as np

    random = _random(3)
    cumulative = _zipf(NUM_WORDS)
    successors = np.searchsorted(cumulative, random.random_sample((NUM_WORDS, 4)), side="right").clip(max=NUM_WORDS - 1)
    table = successors.tolist()
    words = synthetic_words()
    articles = {}
    for split, size in TEXT_WORDS.items():
        which = np.searchsorted([0.6, 0.85, 0.95], random.random_sample(size)).tolist()
        restarts = (
            np.searchsorted(cumulative, random.random_sample(size), side="right").clip(max=NUM_WORDS - 1).tolist()
        )
        restart = (random.random_sample(size) < 0.1).tolist()  # now and then any word, so that no cycle holds the chain
        word, text = 0, []
        for position in range(size):
            word = restarts[position] if restart[position] else table[word][which[position]]
            text.append(words[word])
        lines = [" " + " ".join(text[start : start + 100]) + " \n" for start in range(0, size, 100)]
        articles[split] = [row for line in lines for row in (line, "")]
    return articles


def synthetic_tokenizer(workload: str) -> PreTrainedTokenizerBase:
    """Build the word-level tokenizer of the synthetic sample: special tokens, words, reserved entries up to 8,192."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = list(BERT_SPECIAL) if workload == "bert-imdb" else [GPT_SPECIAL]
    entries = [*special, *synthetic_words()]
    entries += [f"[reserved{i}]" for i in range(VOCABULARY - len(entries))]
    vocabulary = {entry: i for i, entry in enumerate(entries)}
    unknown = "[UNK]" if workload == "bert-imdb" else GPT_SPECIAL
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if workload == "gpt-wikitext":
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            unk_token=GPT_SPECIAL,
            bos_token=GPT_SPECIAL,
            eos_token=GPT_SPECIAL,
            pad_token=GPT_SPECIAL,
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    pad, unk, cls, sep, mask = BERT_SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=unk, cls_token=cls, sep_token=sep, mask_token=mask
    )
