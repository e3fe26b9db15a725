"""Text and tokenizer: what each source gives, and what is refused. No network: the hub is played by stand-ins."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import launching
import pyarrow
import pyarrow.parquet
import pytest
from refusing import refusal

from study.config import RunConfig, build_config
from study.workloads import sources, synthetic
from zero_study.errors import Refusal

IMDB, WIKITEXT = "bert-imdb", "gpt-wikitext"


@pytest.fixture
def data_dir(shared_data_dir, tmp_path):
    """A folder of this test's own, to be damaged."""
    return Path(shutil.copytree(shared_data_dir, tmp_path / "data"))


def config(workload: str = IMDB, **more) -> RunConfig:
    return build_config(**{"workload": workload, "num_train_examples": 64, "num_eval_examples": 16, **more})


def files(data_dir: Path, workload: str = IMDB, **more) -> RunConfig:
    return config(workload, data="files", data_dir=data_dir, **more)


# ---------------------------------------------------------------- check


@pytest.mark.launches
def test_check_imports_neither_torch_nor_transformers(shared_data_dir):
    code = (
        "import sys; from study.config import build_config; from study.workloads import sources\n"
        "for workload in ('bert-imdb', 'gpt-wikitext'):\n"
        "    more = dict(workload=workload, num_train_examples=64, num_eval_examples=16)\n"
        "    sources.check(build_config(**more))\n"
        "    sources.check(build_config(data='files', data_dir=sys.argv[1], **more))\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules), sorted(sys.modules)"
    )
    completed = launching.attempt(["python", "-c", code, shared_data_dir])
    assert completed.returncode == 0, completed.stderr


def test_missing_data_dir(tmp_path):
    message = refusal(sources.check, files(tmp_path / "nowhere"))
    assert f"data_dir {tmp_path / 'nowhere'} does not exist. " in message
    assert ("imdb/train.parquet" in message, "wikitext" in message) == (True, False)


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        (IMDB, "imdb/train.parquet"),
        (IMDB, "tokenizers/bert-large-uncased/tokenizer_config.json"),
        (WIKITEXT, "wikitext-2/validation.txt"),
        (WIKITEXT, "tokenizers/gpt2/tokenizer.json"),
    ],
)
def test_missing_file_is_named_where_it_is_needed(data_dir, workload, name):
    (data_dir / name).unlink()
    assert f"lacks {name}, which {workload} needs" in refusal(sources.check, files(data_dir, workload))
    (other,) = {IMDB, WIKITEXT} - {workload}
    sources.check(files(data_dir, other))


def write_reviews(data_dir: Path, **columns) -> Path:
    path = data_dir / "imdb" / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"review": ["a"], "stars": [1]}, "has no column text and no column label, only review, stars"),
        ({"text": ["a"], "label": ["pos"]}, "the column label has type string"),
        ({"text": [1], "label": [1]}, "the column text has type int64"),
    ],
)
def test_wrong_columns(data_dir, columns, expected):
    path = write_reviews(data_dir, **columns)
    message = refusal(sources.check, files(data_dir))
    assert message.startswith(str(path))
    assert expected in message


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("texts", "labels", "expected"),
    [
        (["a", "b"], [0, 2], "0 reviews without text and the labels [0, 2]"),
        (["a", None], [0, 1], "1 reviews without text and the labels [0, 1]"),
        (["a", "b"], [0, None], "and the labels [0, None]"),
    ],
)
def test_reviews_that_nobody_labelled(data_dir, texts, labels, expected):
    write_reviews(data_dir, text=texts, label=labels)
    assert expected in refusal(sources.load_reviews, files(data_dir))


def test_articles_take_the_form_of_the_hub(data_dir):
    text = " \n = Robert Boulter = \n \n one \u2028 two \x85 three \n no newline at the end"
    (data_dir / "wikitext-2" / "train.txt").write_text(text, encoding="utf-8")
    expected = ["", " = Robert Boulter = \n", "", " one \u2028 two \x85 three \n", " no newline at the end\n"]
    articles = sources.load_articles(files(data_dir, WIKITEXT))
    assert articles["train"] == expected
    assert articles["validation"] == synthetic.articles()["validation"][:120]


# ---------------------------------------------------------------- hub


@pytest.fixture
def reachable(monkeypatch):
    monkeypatch.setattr(sources, "_probe_hub", lambda: None)


@pytest.mark.usefixtures("reachable")
def test_reviews_from_the_hub(monkeypatch):
    requested = []

    def load_dataset(*args, **kwargs):
        requested.append((args, kwargs))
        return datasets.Dataset.from_dict({"label": [0, 1], "text": ["a", "b"], "other": [1, 2]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    reviews = sources.load_reviews(config(data="hub"))
    assert requested == [(("stanfordnlp/imdb",), {"split": "train"})]
    assert reviews.column_names == ["text", "label"]


@pytest.mark.usefixtures("reachable")
def test_articles_from_the_hub(monkeypatch):
    rows = {"train": ["", " a \n"], "validation": [" b \n"], "test": [" c \n"]}

    def load_dataset(name, variant):
        assert (name, variant) == ("Salesforce/wikitext", "wikitext-2-raw-v1")
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_dict({"text": lines}) for split, lines in rows.items()}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert sources.load_articles(config(WIKITEXT, data="hub")) == {"train": ["", " a \n"], "validation": [" b \n"]}


def test_the_hub_is_probed_for_seconds_only(monkeypatch):
    requested = []
    session = SimpleNamespace(head=lambda address, timeout: requested.append((address, timeout)))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    assert sources.from_hub("thing", lambda: "fetched") == "fetched"
    ((address, timeout),) = requested
    assert address == huggingface_hub.constants.ENDPOINT
    assert 0 < timeout <= 5


def test_unreachable_hub_is_refused_before_the_library_that_retries(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens on "discard"
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("went on to the library that retries"))
    message = refusal(sources.load_reviews, config(data="hub"))
    assert message.startswith("cannot reach the hub for dataset stanfordnlp/imdb")
    assert message.endswith("use --data files --data-dir FOLDER or --data bundled")


def test_offline_mode_goes_to_the_cache_and_no_further(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert sources.from_hub("thing", lambda: "cached") == "cached"
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(Refusal, match="cannot reach the hub for dataset stanfordnlp/imdb"):
        sources.load_reviews(config(data="hub"))


@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach it\nmore"),
        ValueError("not cached"),
        huggingface_hub.utils.httpx.ConnectTimeout("slow"),
        huggingface_hub.errors.XetDownloadError("torn"),
        datasets.exceptions.DatasetGenerationError("An error occurred"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_hub_failure_is_one_line_and_no_other_source(monkeypatch, error):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(synthetic, "reviews", lambda: pytest.fail("fell back to the sample"))
    with pytest.raises(Refusal) as caught:
        sources.load_reviews(config(data="hub"))
    assert type(error).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_synthetic_sample_is_fixed():
    """Other numbers here mean another sample: records made with the old one are then no longer comparable."""
    for make in (synthetic.words, synthetic.reviews, synthetic.articles):
        make.cache_clear()
    texts, _ = synthetic.reviews()
    articles = synthetic.articles()
    digests = [hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for lines in (texts, *articles.values())]
    assert digests == ["f8d7391b9d41becb", "527d41b8071ece4b", "6ce5ef9c340eb1ae"]
