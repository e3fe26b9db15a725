"""Models, examples, losses and metrics of both workloads, tiny and without network; the published ones on meta."""

from __future__ import annotations

import math
import socket
from typing import Any

import datasets
import evaluate
import pytest
import torch
from torch.utils.data import DataLoader

from study.config import RunConfig, build_config
from study.training.optimizer_steps import TrainingOrder
from study.workloads import WORKLOADS, load_metric, sources
from study.workloads.sources import Examples, Splits
from zero_study.errors import Refusal
from zero_study.models import SIZES

IMDB, WIKITEXT = "bert-imdb", "gpt-wikitext"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"network used: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def config(workload: str, **more) -> RunConfig:
    return build_config(**{"workload": workload, "num_train_examples": 32, "num_eval_examples": 8, **more})


def splits_like(vocab_size: int, pad_token_id: int) -> Splits:
    nothing = Examples(input_ids=torch.empty(0, 8))
    return Splits(train=nothing, evaluation=nothing, vocab_size=vocab_size, pad_token_id=pad_token_id, description={})


def batch_of(examples: Examples, size: int = 4) -> dict[str, torch.Tensor]:
    return next(iter(DataLoader(examples, batch_size=size)))


# ---------------------------------------------------------------- models


PUBLISHED = {  # parameters of the checkpoints, by the words of their vocabulary
    (IMDB, 30522): {"tiny": 4_386_178, "base": 109_483_778, "large": 335_143_938},
    (WIKITEXT, 50257): {"124m": 124_439_808, "355m": 354_823_168, "774m": 774_030_080, "1.5b": 1_557_611_200,
                        "2.7b": 2_651_307_520},
    (WIKITEXT, 50400): {"6b": 6_050_882_784},
}  # fmt: skip


@pytest.mark.parametrize(("workload", "vocab_size"), PUBLISHED)
def test_every_size_is_built_as_it_is_said_and_as_it_was_published(workload, vocab_size):
    """And sdpa is refused where transformers has none, and nowhere else."""
    counts, without = {}, {}
    for size, shape in SIZES[workload].items():
        with torch.device("meta"):
            model = WORKLOADS[workload].build_model(
                config(workload, size=size, attention="eager"), splits_like(vocab_size, 0)
            )
        counts[size] = model.num_parameters()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        if not model._supports_sdpa:
            without[workload, size] = type(model).__name__
        settings = model.config
        built = (settings.num_hidden_layers, settings.hidden_size, settings.num_attention_heads)
        assert built == (shape["layers"], shape["hidden"], shape["heads"])
        assert settings.max_position_embeddings == shape["positions"]
    assert counts | PUBLISHED[workload, vocab_size] == counts
    assert without == {key: name for key, name in sources.WITHOUT_SDPA.items() if key[0] == workload}


@pytest.mark.parametrize("workload", [IMDB, WIKITEXT])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_and_dropout_reach_the_model(workload, attention):
    run = config(workload, attention=attention, dropout=0.25)
    model = WORKLOADS[workload].build_model(run, splits_like(64, 0))
    assert model.config._attn_implementation == attention
    dropouts = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(dropouts) > 4
    assert set(dropouts) == {0.25}


@pytest.mark.parametrize("workload", [IMDB, WIKITEXT])
def test_weights_depend_on_the_callers_seed_only(workload):
    def weights(seed):
        torch.manual_seed(seed)
        model = WORKLOADS[workload].build_model(config(workload), splits_like(64, 0))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(("workload", "size", "vocab_size"), [(IMDB, "tiny", 30522), (WIKITEXT, "124m", 50257)])
def test_pretrained_asks_the_hub_with_the_same_settings(monkeypatch, workload, size, vocab_size):
    module = WORKLOADS[workload]
    model_class = module.BertForSequenceClassification if workload == IMDB else module.GPT2LMHeadModel

    def from_pretrained(name, *, config, dtype):
        assert (name, dtype) == (module.PRETRAINED[size], torch.float32)
        with torch.device("meta"):
            return model_class(config)

    monkeypatch.setattr(sources, "_probe_hub", lambda: None)
    monkeypatch.setattr(model_class, "from_pretrained", from_pretrained)
    run = config(workload, size=size, data="hub", dropout=0.25, attention="eager")
    model = module.build_model(run, splits_like(vocab_size, 0))
    assert model.config.vocab_size == vocab_size
    assert model.config._attn_implementation == "eager"
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}


@pytest.mark.parametrize(("workload", "size", "published"), [(IMDB, "tiny", 30522), (WIKITEXT, "124m", 50257)])
def test_pretrained_weights_of_another_vocabulary_are_refused(shared_data_dir, workload, size, published):
    run = config(workload, size=size, data="files", data_dir=shared_data_dir, init="pretrained")
    with pytest.raises(Refusal, match=f"the tokenizer has 8192 entries, but the published weights have {published}"):
        WORKLOADS[workload].build_model(run, splits_like(8192, 0))


@pytest.mark.parametrize("workload", [IMDB, WIKITEXT])
def test_written_weights_are_loaded_again(tmp_path, workload):
    module, run, splits = WORKLOADS[workload], config(workload), splits_like(64, 0)
    model = module.build_model(run, splits)
    model.save_pretrained(tmp_path)
    loaded = module.load_model(run, splits, tmp_path)
    assert loaded.loss_type == model.loss_type
    saved, found = model.state_dict(), loaded.state_dict()
    assert saved.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in saved.items())


# ---------------------------------------------------------------- examples


@pytest.mark.parametrize("workload", [IMDB, WIKITEXT])
@pytest.mark.parametrize("data", ["bundled", "files"])
def test_examples_have_the_agreed_form(shared_data_dir, workload, data):
    run = config(workload, data=data, data_dir=shared_data_dir if data == "files" else None, sequence_length=24)
    splits = WORKLOADS[workload].load(run)
    assert (len(splits.train), len(splits.evaluation)) == (32, 8)
    assert (splits.vocab_size, splits.pad_token_id) == (8192, 0)
    for examples in (splits.train, splits.evaluation):
        item = examples[5]
        assert set(item) == {"input_ids", "attention_mask", "labels"}
        assert {tensor.dtype for tensor in item.values()} == {torch.int64}
        assert item["input_ids"].shape == item["attention_mask"].shape == (24,)
        assert item["labels"].shape == (() if workload == IMDB else (24,))
    if workload == WIKITEXT:
        assert torch.equal(item["labels"], item["input_ids"])
        assert item["attention_mask"].all()
    else:
        assert torch.equal(item["attention_mask"], (item["input_ids"] != 0).long())


def test_reviews_are_drawn_as_the_published_protocol_draws_them(shared_data_dir):
    run = config(IMDB, data="files", data_dir=shared_data_dir, split_seed=7)
    splits = WORKLOADS[IMDB].load(run)
    tokenizer = sources.load_tokenizer(run)
    whole = datasets.Dataset.from_parquet(str(shared_data_dir / "imdb" / "train.parquet"), keep_in_memory=True)
    parts = whole.train_test_split(test_size=0.2, seed=7)
    for part, examples in (("train", splits.train), ("test", splits.evaluation)):
        drawn = parts[part].shuffle(seed=7).select(range(len(examples)))
        assert examples.tensors["labels"].tolist() == drawn["label"][:]
        for i in range(len(examples)):
            expected = tokenizer(drawn[i]["text"], max_length=64, truncation=True, padding="max_length")["input_ids"]
            assert examples[i]["input_ids"].tolist() == expected
    assert 0 < sum(splits.train.tensors["labels"].tolist()) < 32  # the file is sorted by label


def test_blocks_are_contiguous_and_drawn_with_the_seed():
    run = config(WIKITEXT, sequence_length=16)
    splits = WORKLOADS[WIKITEXT].load(run)
    tokenizer = sources.load_tokenizer(run)
    ids = {
        split: tokenizer("".join(lines), add_special_tokens=False, verbose=False)["input_ids"]
        for split, lines in sources.load_articles(run).items()
    }
    assert splits.evaluation.tensors["input_ids"].flatten().tolist() == ids["validation"][: 8 * 16]
    blocks = [tuple(ids["train"][i : i + 16]) for i in range(0, len(ids["train"]) - 15, 16)]
    drawn = [tuple(row) for row in splits.train.tensors["input_ids"].tolist()]
    assert set(drawn) <= set(blocks)
    assert len(set(drawn)) == 32
    assert drawn != blocks[:32]
    other = WORKLOADS[WIKITEXT].load(config(WIKITEXT, sequence_length=16, split_seed=43))
    assert [tuple(row) for row in other.train.tensors["input_ids"].tolist()] != drawn


@pytest.mark.parametrize("workload", [IMDB, WIKITEXT])
def test_digest_tells_data_apart_and_ignores_the_training_seed(workload):
    def digest(**more):
        return WORKLOADS[workload].load(config(workload, **more)).description["digest"]

    assert digest() == digest(seed=3, learning_rate=1e-4)
    assert len({digest(), digest(split_seed=1), digest(num_eval_examples=9), digest(sequence_length=32)}) == 4


# ---------------------------------------------------------------- their order


@pytest.mark.parametrize("num_examples", [48, 50])
def test_each_example_once_per_epoch(num_examples):
    """But those of an incomplete last batch; the last epoch may end early."""
    order = TrainingOrder(num_examples=num_examples, global_batch_size=8, num_steps=12, seed=0)
    whole = list(order)
    assert len(order) == len(whole) == 96
    for epoch in (whole[:48], whole[48:]):
        assert len(set(epoch)) == 48
        assert set(epoch) <= set(range(num_examples))
    assert whole[:48] != whole[48:]
    assert list(TrainingOrder(num_examples=num_examples, global_batch_size=8, num_steps=7, seed=0)) == whole[:56]


def test_only_its_own_seed_counts():
    orders = []
    for seed, other in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(other)
        orders.append(list(TrainingOrder(num_examples=48, global_batch_size=8, num_steps=6, seed=seed)))
    assert orders[0] == orders[1] != orders[2]


# ---------------------------------------------------------------- loss and predictions


def built(workload: str, **more) -> tuple[Any, Splits, torch.nn.Module]:
    """A workload, its examples and its model, which drops nothing."""
    module, run = WORKLOADS[workload], config(workload, **more)
    splits = module.load(run)
    return module, splits, module.build_model(run, splits).eval()


def test_bert_loss_and_predictions_by_hand():
    module, splits, model = built(IMDB)
    batch = batch_of(splits.train)
    output = model(**module.inputs(batch))
    reference = model(**batch)
    assert torch.allclose(module.loss(output, batch), reference.loss)
    predicted, labels = module.predictions(output, batch)
    assert torch.equal(labels, batch["labels"])
    rows = module.sequence_losses(output, batch)
    assert (rows.shape, rows.mean().item()) == ((4,), pytest.approx(reference.loss.item(), rel=1e-5))
    assert predicted.tolist() == [int(row[1] > row[0]) for row in output.logits.tolist()]


def test_gpt_loss_is_the_mean_of_its_predictions():
    module, splits, model = built(WIKITEXT)
    batch = batch_of(splits.train)
    output = model(**module.inputs(batch))
    losses, tokens = module.predictions(output, batch)
    assert losses.shape == tokens.shape == (4,)
    assert tokens.tolist() == [63] * 4
    logs = output.logits.log_softmax(dim=-1)
    by_hand = [-sum(logs[i, t, batch["input_ids"][i, t + 1]].item() for t in range(63)) / 63 for i in range(4)]
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-4)
    assert module.loss(output, batch).item() == pytest.approx(losses.mean().item(), rel=1e-5)
    assert module.sequence_losses(output, batch).tolist() == pytest.approx(losses.tolist())


# ---------------------------------------------------------------- metrics


def test_accuracy_in_batches_of_tensors():
    metric = load_metric("accuracy")
    metric.add_batch(predictions=torch.tensor([1, 1, 1]), references=torch.tensor([1, 1, 0]))
    metric.add_batch(predictions=torch.tensor([0]), references=torch.tensor([0]))
    assert metric.compute() == {"accuracy": 0.75}


def test_perplexity_weighs_by_tokens():
    metric = load_metric("perplexity")
    metric.add(predictions=1.0, references=30)
    metric.add(predictions=2.0, references=10)
    result = metric.compute()
    assert result == {"validation_loss": pytest.approx(1.25), "perplexity": pytest.approx(math.exp(1.25))}


@pytest.mark.parametrize(("loss", "expected"), [(800.0, math.inf), (math.inf, math.inf)])
def test_perplexity_of_a_diverged_model_is_infinite(loss, expected):
    assert load_metric("perplexity").compute(predictions=[loss], references=[3])["perplexity"] == expected


def test_cache_that_cannot_be_written(monkeypatch):
    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "cache")

    monkeypatch.setattr(evaluate, "load", deny)
    with pytest.raises(Refusal, match=r"accuracy .*Permission denied.* Set HF_HOME to a folder"):
        load_metric("accuracy")
