"""Generate the bundled sample: reviews, text and tokenizers of pseudo-words, with the same bytes on every machine.

The sample is not a real language, but a task that a tiny model can learn if no text is available. Importing this module
does not import torch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from zero_study.models import BUNDLED_VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_WORDS = 8000
NUM_REVIEWS = 2000
NUM_SENTIMENT_WORDS = 8  # positive ones, and as many negative ones
TEXT_WORDS = {"train": 160_000, "validation": 24_000}
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GPT_SPECIAL = "<|endoftext|>"


@cache
def words() -> tuple[str, ...]:
    """Return 8,000 pseudo-words of two or three syllables.

    Short words come first, because frequent words are short in real languages.
    """
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    short = [a + b for a in syllables for b in syllables]
    long = [a + b + c for a in syllables for b in syllables for c in syllables[::7]]
    ordered = [pool[i] for seed, pool in enumerate((short, long)) for i in _random(seed).permutation(len(pool))]
    return tuple(ordered[:NUM_WORDS])


@cache
def reviews() -> tuple[list[str], list[int]]:
    """Return reviews and their labels, sorted by label as in IMDB.

    On average, four of ten words have a sentiment. For nine of ten of these words, it is the sentiment of the label.
    All other words are drawn by frequency. BERT tiny is well above chance after 30 steps of 8 reviews at learning rate
    1e-3. After fewer steps, it is still at chance.
    """
    vocabulary = np.array(words())
    sentiment = vocabulary[: 2 * NUM_SENTIMENT_WORDS].reshape(2, -1)  # row 0 negative, row 1 positive
    neutral = vocabulary[2 * NUM_SENTIMENT_WORDS :]
    random = _random(2)
    labels = np.arange(NUM_REVIEWS) * 2 // NUM_REVIEWS
    lengths = random.randint(30, 91, size=NUM_REVIEWS)
    label_of_word = np.repeat(labels, lengths)
    size = len(label_of_word)
    agrees = random.random_sample(size) < 0.9
    kind = np.where(agrees, label_of_word, 1 - label_of_word)
    drawn = np.where(
        random.random_sample(size) < 0.4,
        sentiment[kind, random.randint(NUM_SENTIMENT_WORDS, size=size)],
        neutral[_by_frequency(random, len(neutral), size)],
    ).tolist()
    ends = np.cumsum(lengths).tolist()
    texts = [" ".join(drawn[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]
    return texts, labels.tolist()


@cache
def articles() -> dict[str, list[str]]:
    """Return the lines of a generated text as a dictionary with the keys "train" and "validation".

    A Markov chain generates the text. Each word has four possible successors, which are drawn by frequency. A model
    learns the frequencies first and the successors later. Lines have 100 words and the format of WikiText-2 on the hub.
    """
    random = _random(3)
    successors = _by_frequency(random, NUM_WORDS, (NUM_WORDS, 4)).tolist()
    vocabulary = words()
    lines_of = {}
    for split, size in TEXT_WORDS.items():
        choice = np.searchsorted([0.6, 0.85, 0.95], random.random_sample(size)).tolist()
        restarts = _by_frequency(random, NUM_WORDS, size).tolist()
        restart = (random.random_sample(size) < 0.1).tolist()  # sometimes a random word, to leave cycles
        word, text = 0, []
        for position in range(size):
            word = restarts[position] if restart[position] else successors[word][choice[position]]
            text.append(vocabulary[word])
        lines = [" " + " ".join(text[start : start + 100]) + " \n" for start in range(0, size, 100)]
        lines_of[split] = [row for line in lines for row in (line, "")]
    return lines_of


def tokenizer(workload: str) -> PreTrainedTokenizerBase:
    """Return the word-level tokenizer of a workload.

    The vocabulary has the special tokens, the pseudo-words, and reserved entries up to BUNDLED_VOCABULARY.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = list(BERT_SPECIAL) if workload == "bert-imdb" else [GPT_SPECIAL]
    entries = [*special, *words()]
    entries += [f"[reserved{i}]" for i in range(BUNDLED_VOCABULARY - len(entries))]
    vocabulary = {entry: i for i, entry in enumerate(entries)}
    unknown = "[UNK]" if workload == "bert-imdb" else GPT_SPECIAL
    by_word = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if workload == "gpt-wikitext":
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=by_word,
            unk_token=GPT_SPECIAL,
            bos_token=GPT_SPECIAL,
            eos_token=GPT_SPECIAL,
            pad_token=GPT_SPECIAL,
        )
    by_word.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    pad, unk, cls, sep, mask = BERT_SPECIAL
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=by_word, pad_token=pad, unk_token=unk, cls_token=cls, sep_token=sep, mask_token=mask
    )


def _random(seed: int) -> np.random.RandomState:
    return np.random.RandomState(seed)  # the only numpy generator whose numbers never change between versions


def _by_frequency(random: np.random.RandomState, num_words: int, shape: int | tuple[int, ...]) -> np.ndarray:
    """Return random ranks of words, with frequencies by the law of Zipf and Mandelbrot."""
    frequencies = 1.0 / (np.arange(num_words) + 2.7)
    cumulative = np.cumsum(frequencies / frequencies.sum())
    return np.searchsorted(cumulative, random.random_sample(shape), side="right").clip(max=num_words - 1)
