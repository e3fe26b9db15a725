"""A small folder for `--data files`, with the layout of the real one and the synthetic sample inside."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet

from study.workloads import sources, synthetic


def make_data_dir(path: Path, num_reviews: int = 200) -> Path:
    """Write imdb/ (sorted by label), wikitext-2/ (400 and 90 blocks of 64 tokens), both tokenizers; return `path`."""
    for folder in ("imdb", "wikitext-2", "tokenizers"):
        (path / folder).mkdir(parents=True)
    texts, labels = synthetic.reviews()
    negatives, positives = num_reviews // 2, num_reviews - num_reviews // 2
    label = pyarrow.array(labels[:negatives] + labels[-positives:], pyarrow.int64())
    table = pyarrow.table({"text": texts[:negatives] + texts[-positives:], "label": label})
    pyarrow.parquet.write_table(table, path / "imdb" / "train.parquet")
    for split, num_lines in {"train": 600, "validation": 120}.items():
        # Every other line is blank, the rest have 100 words.
        lines = synthetic.articles()[split][:num_lines]
        (path / "wikitext-2" / f"{split}.txt").write_text("".join(line or " \n" for line in lines), encoding="utf-8")
    for workload, folder in sources.FILES_TOKENIZER.items():
        synthetic.tokenizer(workload).save_pretrained(path / folder)
    return path
