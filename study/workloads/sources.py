"""Load text and tokenizers from the Hugging Face hub, a folder of files, or the bundled synthetic sample.

No source replaces another. If the requested source cannot provide the data, `Refusal` is raised.
Importing this module and calling `check` import neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from study.config import RunConfig
from study.workloads import synthetic
from zero_study.errors import Refusal
from zero_study.files import sha256

if TYPE_CHECKING:
    import datasets
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
# Both are needed. Without the second, transformers makes a tokenizer with an empty vocabulary, without a warning.
TOKENIZER_PARTS = ("tokenizer_config.json", "tokenizer.json")

# Models that do not support SDPA in transformers, by workload and size. A test compares this with transformers.
WITHOUT_SDPA = {("gpt-wikitext", "2.7b"): "GPTNeoForCausalLM", ("gpt-wikitext", "6b"): "GPTJForCausalLM"}

WEIGHTS = "model.safetensors"  # the file that save_pretrained writes if the model fits into one file

HELD_OUT = 0.2  # share of the labeled training reviews that is held out
HUB_PROBE_SECONDS = 5.0


class Examples:
    """A map-style dataset of examples with equal length. Item i is {name: tensor[i]}."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors["input_ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The examples of one run, and the properties of the data that the model depends on."""

    train: Examples
    evaluation: Examples
    vocab_size: int  # rows of the embedding
    pad_token_id: int
    description: dict[str, Any]  # for the record


class ModelOutput(Protocol):
    """The output of a model that has a loss and logits. In the types of transformers, both are optional."""

    loss: torch.Tensor
    logits: torch.Tensor


# ---------------------------------------------------------------- before anything is launched


def check(config: RunConfig) -> None:
    """Raise Refusal if the workload cannot build the run's model, or if its data are missing or insufficient.

    This takes milliseconds and does not contact the hub.
    """
    name = WITHOUT_SDPA.get((config.workload, config.size))
    if config.attention == "sdpa" and name:
        raise Refusal(f"transformers has no SDPA for {name} ({config.size}). Use --attention eager.")
    if config.weights is not None and not (config.weights / WEIGHTS).is_file():
        raise Refusal(
            f"--weights {config.weights}: this folder has no {WEIGHTS}. Name the folder model/ of a run, "
            "or start a study "
            "with `zero-study run STUDY`, which trains its own weights."
        )
    if config.data == "files":
        _check_folder(config)
        if config.workload == "bert-imdb":
            _check_parquet(config)
        else:
            _check_texts(config)
    elif config.data == "bundled":
        if config.workload == "bert-imdb":
            require_reviews(config, synthetic.NUM_REVIEWS, "the bundled sample")
        else:
            for split, words in synthetic.TEXT_WORDS.items():
                require_blocks(config, split, words // config.sequence_length, "the bundled sample")


def require_reviews(config: RunConfig, num_reviews: int, source: str) -> None:
    """Raise Refusal if a run requests more examples than the training or the held-out part of the reviews has."""
    num_held_out = math.ceil(HELD_OUT * num_reviews)  # train_test_split of datasets rounds up too
    for name, requested, available, part in (
        ("num_train_examples", config.num_train_examples, num_reviews - num_held_out, "80 %"),
        ("num_eval_examples", config.num_eval_examples, num_held_out, "20 %"),
    ):
        if requested > available:
            raise Refusal(
                f"{name} {requested} is more than the {available} reviews ({part} of {num_reviews}) in {source}. Lower "
                f"--{name.replace('_', '-')}."
            )


def require_blocks(config: RunConfig, split: str, available: int, source: str) -> None:
    """Raise Refusal if a run requests more examples than the text has blocks. `split` is "train" or "validation"."""
    name = {"train": "num_train_examples", "validation": "num_eval_examples"}[split]
    requested = getattr(config, name)
    if requested > available:
        raise Refusal(
            f"{name} {requested} is more than the {available} {split} blocks of {config.sequence_length} tokens in "
            f"{source}. Lower --{name.replace('_', '-')} or --sequence-length."
        )


def _check_folder(config: RunConfig) -> None:
    folder = _data_dir(config)
    needed = [*FILES_DATA[config.workload], *(f"{FILES_TOKENIZER[config.workload]}/{part}" for part in TOKENIZER_PARTS)]
    try:
        if not folder.exists():
            raise Refusal(f"data_dir {folder} does not exist. Pass a folder with {', '.join(needed)} to --data-dir.")
        if not folder.is_dir():
            raise Refusal(f"data_dir {folder} is not a folder. Pass a folder with {', '.join(needed)} to --data-dir.")
        if not any(folder.iterdir()):
            raise Refusal(f"data_dir {folder} is empty. Pass a folder with {', '.join(needed)} to --data-dir.")
        missing = [name for name in needed if not (folder / name).is_file()]
        if missing:
            raise Refusal(
                f"data_dir {folder} lacks {', '.join(missing)}, which {config.workload} needs. Add these files, or "
                "correct --data-dir."
            )
        for name in needed:
            with (folder / name).open("rb") as file:
                file.read(1)
    except OSError as error:
        raise _unreadable(error.filename or folder, error) from error


def _data_dir(config: RunConfig) -> Path:
    assert config.data_dir is not None  # RunConfig checks this
    return config.data_dir


def _unreadable(path: Path | str, error: Exception) -> Refusal:
    return Refusal(f"cannot read {path} ({_first_line(error)}). Repair this file, or correct --data-dir.")


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
        raise Refusal(f"{path} is not a parquet file. Replace this file, or correct --data-dir.") from error
    missing = [column for column in ("text", "label") if column not in schema.names]
    if missing:
        raise Refusal(
            f"{path} has no column {' and no column '.join(missing)}, only {', '.join(schema.names)}. Rename its "
            "columns, or correct --data-dir."
        )
    text, label = schema.field("text").type, schema.field("label").type
    if not (types.is_string(text) or types.is_large_string(text)) or not types.is_integer(label):
        raise Refusal(
            f"{path}: the column text has type {text}, and the column label has type {label}. Convert "
            "the text to strings, and the label to integers."
        )
    require_reviews(config, num_rows, str(path))


def _check_texts(config: RunConfig) -> None:
    for name in FILES_DATA[config.workload]:
        path = _data_dir(config) / name
        with path.open("rb") as file:
            if not any(line.strip() for line in file):
                raise Refusal(f"{path} contains no text. Replace this file, or correct --data-dir.")
        # A token has at least one byte, so this finds only texts that are certainly too short. `load` counts tokens.
        require_blocks(config, path.stem, path.stat().st_size // config.sequence_length, str(path))


# ---------------------------------------------------------------- what the workloads load


def load_reviews(config: RunConfig) -> datasets.Dataset:
    """Return all labeled training reviews in their original order.

    The columns are `text` and `label`, which is 1 for positive and 0 for negative.
    """
    import datasets

    if config.data == "hub":
        (name,) = HUB_DATA["bert-imdb"]
        reviews = from_hub(f"dataset {name}", lambda: datasets.load_dataset(name, split="train"))
        return reviews.select_columns(["text", "label"])
    if config.data == "bundled":
        texts, labels = synthetic.reviews()
        return datasets.Dataset.from_dict({"text": texts, "label": labels})

    import pyarrow
    import pyarrow.parquet

    path = _data_dir(config) / FILES_DATA["bert-imdb"][0]
    try:
        # Read into memory here, because the readers of datasets write a copy to a cache.
        table = pyarrow.parquet.ParquetFile(path).read(columns=["text", "label"])
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error
    label_values = set(table["label"].unique().to_pylist())
    if table["text"].null_count or not label_values <= {0, 1}:
        raise Refusal(
            f"{path} has {table['text'].null_count} reviews without text and the labels "
            f"{sorted(label_values, key=str)}. Give every review a text, and the label 0 or 1."
        )
    return datasets.Dataset(table)


def load_articles(config: RunConfig) -> dict[str, list[str]]:
    """Return the lines of WikiText-2 as a dictionary with the keys "train" and "validation".

    The format is that of the hub: lines end with a newline, and a blank line is "".
    """
    if config.data == "hub":
        import datasets

        name, variant = HUB_DATA["gpt-wikitext"]
        articles = from_hub(f"dataset {name} {variant}", lambda: datasets.load_dataset(name, variant))
        return {split: list(articles[split]["text"]) for split in ("train", "validation")}
    if config.data == "bundled":
        return synthetic.articles()
    return {Path(name).stem: _read_lines(_data_dir(config) / name) for name in FILES_DATA["gpt-wikitext"]}


def _read_lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            return [line.removesuffix("\n") + "\n" if line.strip() else "" for line in file]
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not UTF-8 text (byte {error.start}). Convert it, or correct --data-dir") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the workload. GPT's tokenizer pads with its end-of-text token."""
    from transformers import AutoTokenizer

    if config.data == "bundled":
        tokenizer = synthetic.tokenizer(config.workload)
    elif config.data == "hub":
        name = HUB_TOKENIZER[config.workload]
        tokenizer = from_hub(f"tokenizer {name}", lambda: AutoTokenizer.from_pretrained(name))
    else:
        folder = _data_dir(config) / FILES_TOKENIZER[config.workload]
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # a damaged file can raise any exception in tokenizers and transformers
            raise Refusal(
                f"{folder} contains no usable tokenizer ({_first_line(error)}). Replace the tokenizer, or "
                "correct --data-dir"
            ) from error
    if config.workload == "gpt-wikitext":
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise Refusal(
            f"the tokenizer of --data {config.data} cannot be used for {config.workload}, because it has "
            "no padding token or end token. Use another tokenizer"
        )
    return tokenizer


def from_hub(
    subject: str, load: Callable[[], T], remedy: str = "use --data files --data-dir FOLDER or --data bundled"
) -> T:
    """Return the result of `load`, which uses the hub. Raises Refusal with `remedy` if the network or the hub fails.

    One request without retries is sent first, because the libraries retry for 20 to 50 seconds without a network. With
    HF_HUB_OFFLINE=1 no request is sent, and the hub's cache is used.
    """
    try:
        _probe_hub()
        return load()
    except _hub_failures() as error:
        raise Refusal(
            f"cannot reach the hub for {subject}, or the hub answered with an error ({_first_line(error)}). "
            f"To continue, {remedy}"
        ) from error


def from_folder(folder: Path, model_class: type[Any], settings: Any, drawn: tuple[str, ...] = ()) -> Any:
    """Return a model with the fp32 weights that are in a folder.

    Parameters whose names begin with one of `drawn` may be missing in the folder. They get random weights.

    Raises Refusal if the weights in the folder are not those of such a model.
    """
    import torch

    try:
        model, loading_info = model_class.from_pretrained(
            folder, config=settings, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError means another shape
        raise Refusal(
            f"--weights {folder}: these weights cannot be loaded ({_first_line(error)}). Name a model of this size."
        ) from error
    lacking = sorted(name for name in loading_info["missing_keys"] if not name.startswith(drawn))
    for names, verb in ((lacking, "lacks"), (sorted(loading_info["unexpected_keys"]), "has")):
        if names:
            raise Refusal(
                f"--weights {folder}: this model {verb} {names[0]}, in contrast to the model of the run. "
                "Name a model of this size."
            )
    return model


def nothing_left(config: RunConfig) -> Refusal:
    """Return the Refusal for a run that uses the whole text, so that no text is left for pretraining."""
    return Refusal(
        f"num_train_examples {config.num_train_examples} uses all of {config.workload}'s text, so nothing is left to "
        "pretrain a model on. Lower num_train_examples in the study."
    )


def weights_sha256(folder: Path) -> str:
    """Return the SHA-256 of the weights in a folder."""
    return sha256(folder / WEIGHTS)


def _hub_failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that the libraries raise for failures of the network, the hub and its cache."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    # The errors of huggingface_hub have no common base class, and those of httpx are not OSErrors.
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
    """Return a description of the data for the record: source, counts, and a digest of tokens and labels."""
    if config.data == "hub":
        names = {"text": list(HUB_DATA[config.workload]), "tokenizer": HUB_TOKENIZER[config.workload]}
    elif config.data == "files":
        names = {"text": list(FILES_DATA[config.workload]), "tokenizer": FILES_TOKENIZER[config.workload]}
    else:
        names = {"text": ["synthetic"], "tokenizer": "synthetic"}
    counts = {f"num_{split}_examples": len(examples) for split, examples in splits.items()}
    return {"source": config.data, **names, **counts, **more, "digest": digest(*splits.values())}


def digest(*parts: Examples) -> str:
    """Return the SHA-256 of the token ids and labels of all splits in order, including their shapes."""
    total = hashlib.sha256()
    for part in parts:
        for name in ("input_ids", "labels"):
            array = part.tensors[name].numpy().astype("<i8", order="C")
            total.update(json.dumps([name, array.shape]).encode())
            total.update(array.tobytes())
    return total.hexdigest()


def at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits in fp32, or in fp64 if they are fp64, because losses are computed in these types."""
    import torch

    return logits if logits.dtype == torch.float64 else logits.float()
