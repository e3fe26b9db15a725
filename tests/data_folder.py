"""A small folder for `--data files`, with the layout of the real one and the synthetic sample inside."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet

from study.workloads import sources, synthetic


def make_data_dir(path: Path, num_reviews: int = 200) -> Path:
    """Write imdb/ (sorted by label, balanced), wikitext-2/ (in its original form) and both tokenizers; return `path`.

    Enough for num_reviews * 0.8 training reviews, and for 400 training and 90 evaluation blocks of 64 tokens.
    """
    for folder in ("imdb", "wikitext-2", "tokenizers"):
        (path / folder).mkdir(parents=True)
    texts, labels = synthetic.reviews()
    negatives, positives = num_reviews // 2, num_reviews - num_reviews // 2
    table = pyarrow.table(
        {
            "text": texts[:negatives] + texts[-positives:],
            "label": pyarrow.array(labels[:negatives] + labels[-positives:], pyarrow.int64()),
        }
    )
    pyarrow.parquet.write_table(table, path / "imdb" / "train.parquet")
    for split, num_lines in (
        ("train", 600),
        ("validation", 120),
    ):  # every other line is blank, the rest have 100 words
        lines = synthetic.articles()[split][:num_lines]
        (path / "wikitext-2" / f"{split}.txt").write_text("".join(line or " \n" for line in lines), encoding="utf-8")
    for workload, folder in sources.FILES_TOKENIZER.items():
        synthetic.tokenizer(workload).save_pretrained(path / folder)
    return path
