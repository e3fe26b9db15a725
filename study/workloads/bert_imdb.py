"""Define the workload bert-imdb: BERT with two classes learns the sentiment of film reviews.

The data are drawn as in the protocol of the source a100-replication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, DataCollatorForLanguageModeling

from study.config import RunConfig
from study.workloads import sources
from study.workloads.sources import Examples, ModelOutput, Splits
from zero_study.errors import Refusal
from zero_study.models import SIZES

if TYPE_CHECKING:
    from pathlib import Path

    import datasets
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

METRIC = "accuracy"

PRETRAINED = {
    "tiny": "google/bert_uncased_L-2_H-128_A-2",
    "micro": "google/bert_uncased_L-4_H-128_A-2",
    "mini": "google/bert_uncased_L-4_H-256_A-4",
    "small": "google/bert_uncased_L-4_H-512_A-8",
    "medium": "google/bert_uncased_L-8_H-512_A-8",
    "base": "google-bert/bert-base-uncased",
    "large": "google-bert/bert-large-uncased",
}
PRETRAINED_VOCABULARY = 30522


def load(config: RunConfig) -> Splits:
    """Return the tokenized reviews on which a run trains and evaluates.

    The reviews are split 80/20, each part is shuffled, and the first ones of each part are taken. `split_seed` decides
    the split and the order.
    """
    sources.check(config)
    tokenizer = sources.load_tokenizer(config)
    parts = _shuffled(config)
    drawn = {
        "train": parts["train"].select(range(config.num_train_examples)),
        "eval": parts["test"].select(range(config.num_eval_examples)),
    }
    splits = {split: tokenise(part, tokenizer, config.sequence_length) for split, part in drawn.items()}
    return Splits(
        train=splits["train"],
        evaluation=splits["eval"],
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        description=sources.describe(config, splits),
    )


def _shuffled(config: RunConfig) -> datasets.DatasetDict:
    """Return the shuffled training and held-out reviews. Runs use the first reviews of each part."""
    reviews = sources.load_reviews(config)
    sources.require_reviews(config, len(reviews), f"--data {config.data}")
    return reviews.train_test_split(test_size=sources.HELD_OUT, seed=config.split_seed).shuffle(seed=config.split_seed)


def tokenise(reviews: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Examples:
    """Return the tokens of each review, cut or padded to `length`. The shape is (reviews, length)."""
    tokens = tokenizer(list(reviews["text"]), max_length=length, truncation=True, padding="max_length")
    return Examples(
        input_ids=torch.tensor(tokens["input_ids"]),
        attention_mask=torch.tensor(tokens["attention_mask"]),
        labels=torch.tensor(reviews["label"][:]),
    )


def model_config(config: RunConfig, splits: Splits) -> BertConfig:
    """Return the complete configuration of the model, so that no configuration has to be downloaded."""
    return _settings(config, splits.vocab_size, splits.pad_token_id)


def _settings(config: RunConfig, vocab_size: int, pad_token_id: int) -> BertConfig:
    size = SIZES["bert-imdb"][config.size]
    settings: dict[str, Any] = {"num_labels": 2, "use_cache": False, "attn_implementation": config.attention}
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        intermediate_size=4 * size["hidden"],
        max_position_embeddings=size["positions"],
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        classifier_dropout=config.dropout,
        pad_token_id=pad_token_id,
        **settings,
    )


def block_class(config: RunConfig) -> str:
    """Return the name of the class of the model's blocks, which FSDP2 shards one by one."""
    del config  # all sizes have the same class
    return "BertLayer"


def build_model(config: RunConfig, splits: Splits) -> PreTrainedModel:
    """Return a new model with fp32 weights.

    Random weights are drawn with torch's current seed. The head is always random unless a folder of weights contains
    it.
    """
    settings = model_config(config, splits)
    if config.weights is not None:
        # Weights from pretraining on masked words have neither part. The folder model/ of a run has both.
        drawn = ("classifier.", "bert.pooler.")
        own: PreTrainedModel = sources.from_folder(config.weights, BertForSequenceClassification, settings, drawn)
        return own
    if config.effective_init == "scratch":
        return BertForSequenceClassification(settings)
    if splits.vocab_size != PRETRAINED_VOCABULARY:
        raise Refusal(
            f"the tokenizer has {splits.vocab_size} entries, but the published weights have {PRETRAINED_VOCABULARY}."
            " Correct --data-dir, or use --init scratch."
        )
    name = PRETRAINED[config.size]
    return sources.from_hub(
        f"weights {name}",
        lambda: BertForSequenceClassification.from_pretrained(name, config=settings, dtype=torch.float32),
        remedy="use --init scratch",
    )


def left_over(config: RunConfig) -> Examples:
    """Return the text of all training reviews that a run does not use, as token ids of shape (windows, length)."""
    sources.check(config)
    parts = _shuffled(config)
    texts = parts["train"]["text"][:]
    # IMDB contains some reviews several times.
    drawn = {*texts[: config.num_train_examples], *parts["test"]["text"][: config.num_eval_examples]}
    unused = [text for text in texts[config.num_train_examples :] if text not in drawn]
    if not unused:
        raise sources.nothing_left(config)
    tokens = sources.load_tokenizer(config)(
        unused, max_length=config.sequence_length, truncation=True, padding="max_length", return_overflowing_tokens=True
    )
    ids = torch.tensor(tokens["input_ids"])
    return Examples(input_ids=ids, attention_mask=torch.tensor(tokens["attention_mask"]), labels=ids)


class _MaskedWords(BertForMaskedLM):  # type: ignore[no-untyped-call]
    """BERT for pretraining on masked words (arXiv:1810.04805, section 3.1)."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean cross-entropy under "loss". Scores are computed only at masked positions, to save memory."""
        is_masked = labels != -100
        scores = self.cls(self.bert(input_ids, attention_mask).last_hidden_state[is_masked])
        return {"loss": functional.cross_entropy(scores, labels[is_masked])}


def body(config: RunConfig) -> tuple[PreTrainedModel, PreTrainedModel, DataCollatorForLanguageModeling]:
    """Return three objects: the model to pretrain, its part whose weights are saved, and the batch collator."""
    tokenizer = sources.load_tokenizer(config)
    model = _MaskedWords(_settings(config, len(tokenizer), tokenizer.pad_token_id))
    return model, model.bert, DataCollatorForLanguageModeling(tokenizer)


def load_model(config: RunConfig, splits: Splits, folder: Path, **options: Any) -> PreTrainedModel:
    """Return the model with the weights that `save_pretrained` wrote to `folder`.

    The weights come from `build_model`. The model is partitioned while it is loaded if DeepSpeed is configured for
    that. `options` are further arguments of `from_pretrained`.
    """
    return BertForSequenceClassification.from_pretrained(
        folder, config=model_config(config, splits), dtype=torch.float32, **options
    )


def inputs(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the keyword arguments with which the model is called on a batch.

    Labels are left out, because the model would compute the loss in its precision.
    """
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def loss(model_output: ModelOutput, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy over the batch, in fp32, or in fp64 if the logits are fp64."""
    return functional.cross_entropy(sources.at_least_fp32(model_output.logits), batch["labels"])


def sequence_losses(model_output: ModelOutput, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of each review for evaluation, shape (batch,), in fp32, or in fp64 if the logits are fp64."""
    return functional.cross_entropy(sources.at_least_fp32(model_output.logits), batch["labels"], reduction="none")


def predictions(model_output: ModelOutput, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the predicted and the true labels for the metric, each of shape (batch,)."""
    return model_output.logits.argmax(dim=-1), batch["labels"]
