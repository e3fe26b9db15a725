"""Define the workload gpt-wikitext: GPT-2 and similar larger models predict the next token of WikiText-2.

The text is cut into blocks of equal length.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, GPTJConfig, GPTJForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from study.config import RunConfig
from study.workloads import sources
from study.workloads.sources import Examples, ModelOutput, Splits
from zero_study.errors import Refusal
from zero_study.models import SIZES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

METRIC = "perplexity"

PRETRAINED = {
    "124m": "openai-community/gpt2",
    "355m": "openai-community/gpt2-medium",
    "774m": "openai-community/gpt2-large",
    "1.5b": "openai-community/gpt2-xl",
    "2.7b": "EleutherAI/gpt-neo-2.7B",
    "6b": "EleutherAI/gpt-j-6b",
}
PRETRAINED_VOCABULARY = 50257
GPT_J_VOCABULARY = 50400  # rows of the published embedding: GPT-2's entries, and 143 that no text uses


def load(config: RunConfig) -> Splits:
    """Return the tokenized text on which a run trains and evaluates, cut into blocks.

    Training blocks are drawn with `split_seed`. Evaluation uses the first blocks of the validation text.
    """
    sources.check(config)
    tokenizer = sources.load_tokenizer(config)
    blocks = _shuffled(config, tokenizer)
    splits = {
        "train": _examples(blocks["train"][: config.num_train_examples]),
        "eval": _examples(blocks["validation"][: config.num_eval_examples]),
    }
    more = {}
    if config.data == "files":
        more["note"] = "tokenised WikiText-2, rare words as <unk>; not comparable with wikitext-2-raw-v1"
    published_6b = config.size == "6b" and config.data != "bundled"
    return Splits(
        train=splits["train"],
        evaluation=splits["eval"],
        vocab_size=GPT_J_VOCABULARY if published_6b else len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        description=sources.describe(config, splits, **more),
    )


def _shuffled(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    """Return the shuffled training blocks and the validation blocks in order. Runs use the first blocks of each."""
    articles = sources.load_articles(config)
    blocks = {split: _blocks(lines, tokenizer, config.sequence_length) for split, lines in articles.items()}
    for split, rows in blocks.items():
        sources.require_blocks(config, split, len(rows), f"--data {config.data}")
    order = np.random.default_rng(config.split_seed).permutation(len(blocks["train"]))
    return {**blocks, "train": blocks["train"][order]}


def _blocks(lines: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> np.ndarray:
    """Return the token ids of the joined lines, cut into blocks of shape (num_blocks, length).

    Tokens after the last full block are dropped.
    """
    nonempty = [line for line in lines if line]
    tokens = tokenizer(nonempty, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    ids = np.fromiter(chain.from_iterable(tokens), dtype=np.int64)
    return ids[: len(ids) // length * length].reshape(-1, length)


def _examples(blocks: np.ndarray) -> Examples:
    ids = torch.from_numpy(blocks.copy())
    return Examples(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)


def model_config(config: RunConfig, splits: Splits) -> PreTrainedConfig:
    """Return the complete configuration of the model, so that no configuration has to be downloaded."""
    return _settings(config, splits.vocab_size, splits.pad_token_id)


def _settings(config: RunConfig, vocab_size: int, pad_token_id: int) -> PreTrainedConfig:
    size = SIZES["gpt-wikitext"][config.size]
    shared: dict[str, Any] = {
        "vocab_size": vocab_size,
        "bos_token_id": pad_token_id,
        "eos_token_id": pad_token_id,
        "pad_token_id": pad_token_id,
        "use_cache": False,
        "attn_implementation": config.attention,
    }
    if config.size == "2.7b":
        return GPTNeoConfig(
            hidden_size=size["hidden"],
            num_layers=size["layers"],
            num_heads=size["heads"],
            max_position_embeddings=size["positions"],
            attention_types=[[["global", "local"], size["layers"] // 2]],
            window_size=256,
            resid_dropout=config.dropout,
            embed_dropout=config.dropout,
            attention_dropout=config.dropout,
            **shared,
        )
    shared |= {
        "n_embd": size["hidden"],
        "n_layer": size["layers"],
        "n_head": size["heads"],
        "n_positions": size["positions"],
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }
    if config.size == "6b":
        return GPTJConfig(rotary_dim=64, tie_word_embeddings=False, **shared)
    return GPT2Config(**shared)


def _model_class(config: RunConfig) -> type[PreTrainedModel]:
    return {"2.7b": GPTNeoForCausalLM, "6b": GPTJForCausalLM}.get(config.size, GPT2LMHeadModel)


def block_class(config: RunConfig) -> str:
    """Return the name of the class of the model's blocks, which FSDP2 shards one by one."""
    return {"2.7b": "GPTNeoBlock", "6b": "GPTJBlock"}.get(config.size, "GPT2Block")


def build_model(config: RunConfig, splits: Splits) -> PreTrainedModel:
    """Return a new model with fp32 weights. Random weights are drawn with torch's current seed."""
    settings = model_config(config, splits)
    model_class = _model_class(config)
    if config.weights is not None:
        return _with_loss(sources.from_folder(config.weights, model_class, settings))
    if config.effective_init == "scratch":
        return _with_loss(model_class(settings))
    published = GPT_J_VOCABULARY if config.size == "6b" else PRETRAINED_VOCABULARY
    if splits.vocab_size != published:
        raise Refusal(
            f"the tokenizer has {splits.vocab_size} entries, but the published weights have {published}. Correct"
            " --data-dir or use --init scratch."
        )
    name = PRETRAINED[config.size]
    model = sources.from_hub(
        f"weights {name}",
        lambda: model_class.from_pretrained(name, config=settings, dtype=torch.float32),
        remedy="use --init scratch",
    )
    return _with_loss(model)


def _with_loss(model: PreTrainedModel) -> PreTrainedModel:
    model.loss_type = "ForCausalLM"  # without this, transformers warns and uses the same loss
    return model


def left_over(config: RunConfig) -> Examples:
    """Return the training blocks that a run does not use, of shape (blocks, length)."""
    sources.check(config)
    return _examples(_shuffled(config, sources.load_tokenizer(config))["train"][config.num_train_examples :])


def body(config: RunConfig) -> tuple[PreTrainedModel, PreTrainedModel, None]:
    """Return three objects: the model to pretrain, its part whose weights are saved, and the batch collator.

    The saved part is the whole model. The collator is None, because the examples need no special one.
    """
    tokenizer = sources.load_tokenizer(config)
    model = _with_loss(_model_class(config)(_settings(config, len(tokenizer), tokenizer.pad_token_id)))
    return model, model, None


def load_model(config: RunConfig, splits: Splits, folder: Path, **options: Any) -> PreTrainedModel:
    """Return the model with the weights that `save_pretrained` wrote to `folder`.

    The weights come from `build_model`. The model is partitioned while it is loaded if DeepSpeed is configured for
    that. `options` are further arguments of `from_pretrained`.
    """
    settings = model_config(config, splits)
    return _with_loss(_model_class(config).from_pretrained(folder, config=settings, dtype=torch.float32, **options))


def inputs(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the keyword arguments with which the model is called on a batch.

    There is no attention mask, because blocks have no padding and causal attention has its own kernel.
    """
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def loss(model_output: ModelOutput, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean next-token loss over the batch.

    The mean over tokens equals the mean over blocks, because all blocks have equal lengths. transformers computes the
    loss in fp32. If the logits are fp64, it is computed here in fp64.
    """
    if model_output.logits.dtype == torch.float64:  # transformers would round these to fp32
        return sequence_losses(model_output, batch).mean()
    return model_output.loss


def sequence_losses(model_output: ModelOutput, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean next-token loss of each block for evaluation, shape (batch,).

    It is in fp32, or in fp64 if the logits are fp64.
    """
    logits = sources.at_least_fp32(model_output.logits[:, :-1])
    return functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none").mean(dim=1)


def predictions(model_output: ModelOutput, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean next-token loss and the number of predicted tokens of each block, for the metric."""
    targets = batch["labels"][:, 1:]
    return sequence_losses(model_output, batch), torch.full_like(targets[:, 0], targets.shape[1])
