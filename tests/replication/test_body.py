"""Test the project's own pretrained weights, from which fine-tuning starts, and perturbations of them."""

from __future__ import annotations

import json
import os
import shutil

import launching
import pytest
import torch

from study.config import build_config
from study.run import make_run
from study.running import studies
from study.training import counters, perturbations, pretraining
from study.workloads import WORKLOADS, sources
from zero_study.engines import this_machine
from zero_study.errors import Refusal
from zero_study.strategy.file import read_by_name

IMDB, WIKITEXT = "bert-imdb", "gpt-wikitext"
# What they leave of the bundled sample is enough for some steps.
FLAGS = {IMDB: {"num_train_examples": 1500}, WIKITEXT: {"num_train_examples": 2000}}


def config(workload, **changes):
    return build_config(**{"workload": workload, **FLAGS[workload], **changes})


@pytest.fixture(scope="module", params=[IMDB, pytest.param(WIKITEXT, marks=pytest.mark.slow)])
def trained(request, tmp_path_factory):
    """A workload and the folder of a body that was trained for it in one pass."""
    folder = tmp_path_factory.mktemp("bodies") / "body"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pretraining.EPOCHS, request.param, 1)
        pretraining.train(config(request.param), folder)
    return request.param, folder


@pytest.mark.parametrize("workload", [IMDB, WIKITEXT])
def test_a_body_sees_nothing_that_runs_draw(workload):
    requested = config(workload)
    drawn = WORKLOADS[workload].load(requested)
    rows = lambda examples: {tuple(row) for row in examples.tensors["input_ids"].tolist()}  # noqa: E731
    rest = rows(WORKLOADS[workload].left_over(requested))
    assert len(rest) > 32
    assert not rest & rows(drawn.train)
    assert not rest & rows(drawn.evaluation)


def test_the_same_command_gives_the_same_body(trained, tmp_path, monkeypatch):
    workload, folder = trained
    monkeypatch.setitem(pretraining.EPOCHS, workload, 1)
    again = pretraining.train(config(workload), tmp_path / "again")
    assert again["sha256"] == sources.weights_sha256(folder)
    facts = json.loads((folder / pretraining.FACTS).read_text())
    assert facts | {"seconds": 0} == again | {"seconds": 0}
    assert facts["num_steps"] > 2
    assert facts["text_sha256"] == sources.digest(WORKLOADS[workload].left_over(config(workload)))


def test_a_run_starts_from_it(trained):
    """The head that it lacks is drawn from the seed; all else is the body's, whatever the seed."""
    workload, folder = trained
    requested = config(workload, weights=folder)
    splits = WORKLOADS[workload].load(requested)
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(WORKLOADS[workload].build_model(requested, splits).state_dict())
    drawn = {name for name in states[0] if not torch.equal(states[0][name], states[1][name])}
    assert {name.partition(".")[0] for name in drawn} == ({"classifier", "bert"} if workload == IMDB else set())
    assert all("classifier" in name or "pooler" in name for name in drawn)
    stored = WORKLOADS[workload].body(requested)[1].from_pretrained(folder).state_dict()
    for name, value in stored.items():
        if "pooler" not in name:
            assert torch.equal(states[0][f"bert.{name}" if workload == IMDB else name], value), name


def test_a_body_of_another_size_is_refused(trained):
    workload, folder = trained
    requested = config(workload, weights=folder, size="mini")
    with pytest.raises(Refusal, match=r"Name a model of this size"):
        WORKLOADS[workload].build_model(requested, WORKLOADS[workload].load(requested))


def test_what_is_asked_for_is_there(tmp_path):
    with pytest.raises(Refusal, match=r"no model.safetensors. .*zero-study run STUDY"):
        sources.check(config(IMDB, weights=tmp_path))
    with pytest.raises(Refusal, match="both set the initial weights"):
        config(IMDB, weights=tmp_path, init="scratch")
    assert config(IMDB, weights=tmp_path).effective_init == "weights"
    with pytest.raises(Refusal, match="uses all of bert-imdb's text"):
        pretraining.train(config(IMDB, num_train_examples=1600), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_bodies_of_a_study_are_trained_once(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.yaml"
    flags = f"{{weights: {tmp_path / 'b'}, num_train_examples: 1500}}"
    path.write_text(f"question: why\nparts: [{{strategies: [ddp, zero2], flags: {flags}}}]\n")
    monkeypatch.setitem(pretraining.EPOCHS, IMDB, 1)
    runs = studies.runs(studies.find(str(path)), folder=tmp_path / "runs")
    pretraining.train_missing(runs[:1], runs)
    captured = capsys.readouterr()
    assert "training the pretrained weights that the runs start from" in captured.out
    assert "last loss" not in captured.err
    before = (tmp_path / "b" / sources.WEIGHTS).stat().st_mtime_ns
    pretraining.train_missing(runs, runs)
    assert (tmp_path / "b" / sources.WEIGHTS).stat().st_mtime_ns == before
    shutil.rmtree(tmp_path / "b")
    for run in runs:
        run.folder.mkdir(parents=True)
        (run.folder / "record.json").touch()
    pretraining.train_missing(runs, runs)
    assert not (tmp_path / "b").exists()  # nobody needs it
    assert len({run.config.weights for run in runs}) == 1


def test_a_copy_of_a_review_that_is_drawn_is_not_read(monkeypatch):
    """IMDB has the same text several times."""
    whole = sources.load_reviews(config(IMDB))
    texts = ["the same text" if number % 3 == 0 else text for number, text in enumerate(whole["text"])]
    several = whole.remove_columns("text").add_column("text", texts)
    monkeypatch.setattr(sources, "load_reviews", lambda _: several)
    rest = WORKLOADS[IMDB].left_over(config(IMDB))
    words = sources.load_tokenizer(config(IMDB))("the same text")["input_ids"]
    assert not any(row[: len(words)] == words for row in rest.tensors["input_ids"].tolist())


def test_a_folder_holds_one_body(tmp_path, monkeypatch):
    monkeypatch.setitem(pretraining.EPOCHS, IMDB, 1)
    folder = tmp_path / "b"
    first = config(IMDB, weights=folder)
    one = [make_run(first, read_by_name("ddp"), 2)]
    pretraining.train_missing(one, one)

    def with_another(**changes):
        runs = [*one, make_run(first.model_copy(update=changes), read_by_name("ddp"), 2)]
        pretraining.train_missing(runs[1:], runs)

    with_another(seed=3, num_train_examples=1400)
    with pytest.raises(Refusal, match="runs with different models, splits or lengths use this folder"):
        with_another(sequence_length=32)
    other = [make_run(first.model_copy(update={"split_seed": 1}), read_by_name("ddp"), 2)]
    with pytest.raises(Refusal, match="contains pretrained weights with different settings"):
        pretraining.train_missing(other, other)


# ---------------------------------------------------------------- neighbours


def nudged(seed):
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.LayerNorm(50))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (number < 3))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    perturbations.move_by_one_unit(model, torch.Generator().manual_seed(seed))
    return before, [parameter.detach() for parameter in model.parameters()]


def test_every_weight_moves_to_a_neighbour():
    before, after = nudged(1)
    for old, new in zip(before, after, strict=True):
        up, down = (torch.nextafter(old, torch.tensor(end)) for end in (torch.inf, -torch.inf))
        assert bool(torch.where(old == 0, new == 0, (new == up) | (new == down)).all())
    moved_up = torch.cat([(new > old).flatten() for old, new in zip(before[:2], after[:2], strict=True)])
    assert 0.4 < moved_up.double().mean() < 0.6


def test_a_seed_decides_where_to():
    for one, other in zip(nudged(1)[1], nudged(1)[1], strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(nudged(1)[1][0], nudged(2)[1][0])


# ---------------------------------------------------------------- real runs


@pytest.mark.slow
@pytest.mark.launches
def test_every_strategy_starts_from_the_same_body():
    """DDP builds it whole, ZeRO-3 loads it in parts; a neighbour differs, and no strategy's start does."""

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(pretraining.EPOCHS, IMDB, 1)
            pretraining.train(config(IMDB), folder)

    start = launching.once("body-of-bert", make)
    plain, sharded = (launching.run(name, weights=start).record for name in ("ddp", "zero3"))
    assert plain.init == sharded.init == "weights"
    assert plain.weights_sha256 == sharded.weights_sha256 == sources.weights_sha256(start)
    assert plain.initial_parameters == sharded.initial_parameters
    neighbour, of_stage_3 = (launching.run(name, weights=start, nudge_seed=1).record for name in ("ddp", "zero3"))
    assert neighbour.initial_parameters == of_stage_3.initial_parameters
    assert neighbour.initial_parameters.sha256 != plain.initial_parameters.sha256
    assert neighbour.initial_parameters.square_sum == pytest.approx(plain.initial_parameters.square_sum, rel=1e-7)
    assert neighbour.final_loss == pytest.approx(plain.final_loss, rel=1e-4)
    assert plain.load.own_seconds > 0
    assert plain.load.other_seconds >= 0


# ---------------------------------------------------------------- the load of others


STAT = """\
cpu  1000 0 0 9000 0 0 0 0 0 0
cpu0 {} 0 0 9000 0 0 0 {} 0 0
cpu1 500 100 100 9000 50 10 10 0 500 0
cpu2 {} 0 0 9000 0 0 0 0 0 0
"""


@pytest.mark.parametrize(
    ("allowed", "quota", "num_processors", "others"),
    [
        ([0, 1], None, 2, 3.0),  # and not the 9 s of cpu2
        ([0, 1, 2], 2.5, 2, 7.0),  # of three processors for 10 s others may have 5 s
        ([0, 1, 2], 1.0, 1, 0.0),
        ([6, 7], None, 2, 12.0),  # which /proc/stat does not name: all that it names
    ],
)
def test_load_is_what_others_took_of_the_processors_of_the_run(
    tmp_path, monkeypatch, allowed, quota, num_processors, others
):
    monkeypatch.setattr(counters, "STAT", tmp_path / "stat")
    monkeypatch.setattr(this_machine, "allowed_processors", lambda: allowed)
    monkeypatch.setattr(this_machine, "quota", lambda: quota)
    ticks, moments = os.sysconf("SC_CLK_TCK"), []
    for at, by_all, stolen, by_others in ((10.0, 0, 0, 0), (20.0, 15, 1, 9)):
        counters.STAT.write_text(STAT.format(by_all * ticks, stolen * ticks, by_others * ticks))
        moments.append(counters.read_processors()._replace(at=at))
    result = counters.load_between(*moments, own=12.0)
    assert (result.seconds, result.num_processors, result.own_seconds) == (10.0, num_processors, 12.0)
    assert (result.other_seconds, result.stolen_seconds) == (others, min(1.0, (quota or 9) / len(allowed)))
    assert counters.load_between(*moments, own=30.0).other_seconds == 0  # clocks of the kernel tick


def test_the_box_counts_this_process():
    first, own = counters.read_processors(), counters.own_seconds()
    while counters.own_seconds() - own < 0.2:
        sum(range(100_000))
    result = counters.load_between(first, counters.read_processors(), counters.own_seconds() - own)
    assert result.num_processors >= 1
    assert result.own_seconds >= 0.2
