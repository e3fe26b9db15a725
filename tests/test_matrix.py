"""Is a user's study read as it is meant, in an order that favours no strategy, and refused by its key otherwise?"""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from refusing import refusal

from study.errors import Refusal
from study.running import studies

QUESTION = "question: Which one?\n"


@pytest.fixture
def find(tmp_path):
    def write_and_find(text: str) -> studies.Study:
        (tmp_path / "mine.yaml").write_text(text)
        return studies.find(str(tmp_path / "mine.yaml"))

    return write_and_find


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parts:\n  - {}\n", "question is missing"),
        (QUESTION, "parts is missing"),
        (QUESTION + "parts: []\n", "parts=[]: tuple should have at least 1 item"),
        (QUESTION + "name: mine\nparts: [{}]\n", "name is not a key; the file's own name is the study's"),
        (QUESTION + "text: reel\nparts: [{}]\n", "text='reel': input should be 'bundled' or 'real'"),
        (QUESTION + "control: zero9\nparts: [{}]\n", "control 'zero9' is unknown; it is a strategy, by default 'ddp'"),
        (QUESTION + "parts: [{flag: {}}]\n", "unknown key 'parts.0.flag'"),
        (QUESTION + "parts: [{}, {flags: {sze: tiny}}]\n", "parts.1: flags.sze is not a flag of train.py"),
        (QUESTION + "parts: [{flags: {size: huge}}]\n", "parts.0: size 'huge' is not one of bert-imdb's"),
        (QUESTION + "parts: [{seeds: [010]}]\n", "cannot be read as YAML (line 2: '010' is a number that YAML reads"),
        (QUESTION + "parts: [{world_sizes: [true]}]\n", "parts.0.world_sizes.0=True: input should be a valid integer"),
        (QUESTION + "parts: [{seeds: [4294967296]}]\n", "parts.0.seeds.0=4294967296: input should be less than or"),
        (QUESTION + "parts: [{flags: {max_steps: 10000000000}}]\n", "parts.0: max_steps 10000000000 is more than 1,0"),
        (QUESTION + "parts: [{flags: {seed: 1}}]\n", "parts.0: flags.seed is not a part's: list it under seeds"),
        (QUESTION + "parts: [{flags: {data: hub}}]\n", "parts.0: flags.data is not a part's: write text: real, or"),
        (QUESTION + "parts: [{flags: {measure: 'no'}}]\n", "parts.0: flags.measure='no': write true or false"),
        (QUESTION + "parts: [{flags: {max_steps: true}}]\n", "parts.0: flags.max_steps=True: write a value"),
        (QUESTION + "parts: [{seeds: 3}]\n", "parts.0.seeds=3: input should be a valid tuple"),
        (QUESTION + "parts: [{seeds: [-1]}]\n", "parts.0.seeds.0=-1: input should be greater than or equal to 0"),
        (QUESTION + "parts: [{world_sizes: [0]}]\n", "parts.0.world_sizes.0=0: input should be greater than"),
        (QUESTION + "parts: [{strategies: [zero9]}]\n", "parts.0: strategy 'zero9' is unknown; did you mean zero"),
        (QUESTION + "parts: [{strategies: [ddp, ddp]}]\n", "parts.0: strategies: ddp is there twice"),
        (QUESTION + "parts: [{strategies: []}]\n", "parts.0: strategies is empty"),
        (QUESTION + "parts: [{repeats: 0}]\n", "parts.0.repeats=0: input should be greater than or equal to 1"),
        (QUESTION + "parts: [{label: A-b}]\n", "parts.0.label='A-b': string should match pattern"),
        (QUESTION + "parts: [{flags: {global_batch_size: 8}, global_batch_sizes: [8]}]\n", "parts.0: flags.global_"),
        (QUESTION + "parts: [{global_batch_sizes: [512]}]\n", "parts.0: num_train_examples 256 is less than one"),
        ("[]", "holds no keys; copy one of studies/"),
    ],
)
def test_a_mistake_is_refused_by_its_key(find, tmp_path, text, message):
    assert refusal(find, text).startswith(f"{tmp_path / 'mine.yaml'}: {message}")


def test_parts_that_differ_in_flags_only_need_labels(find):
    study = find(QUESTION + "parts: [{strategies: [ddp]}, {strategies: [ddp], flags: {max_steps: 3}}]\n")
    with pytest.raises(Refusal, match="two runs are called bert-imdb-tiny-ddp-2x-seed0; give a part another label"):
        studies.runs(study)


def test_repeats_are_interleaved_and_the_order_rotates(find):
    study = find(QUESTION + "parts: [{strategies: [ddp, zero1, zero2], seeds: [5, 6], repeats: 2}]\n")
    runs = studies.runs(study)
    assert [run.round for run in runs] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    rounds = [[run.strategy.name for run in runs[start : start + 3]] for start in (0, 3, 6, 9)]
    assert all(sorted(names) == ["ddp", "zero1", "zero2"] for names in rounds)
    assert len({names[0] for names in rounds}) == 3  # each is first once
    assert [run.config.seed for run in runs[::3]] == [5, 6, 5, 6]
    assert [run.run_id.endswith("-repeat1") for run in runs] == [False] * 6 + [True] * 6


def test_no_strategy_always_runs_first_or_after_the_same_one():
    runs = studies.runs(studies.find("multi-gpu"))
    assert len({runs[at].strategy.name for at in range(0, len(runs), 8)}) > 2
    before: dict[str, set[str]] = {}
    for one, other in pairwise(runs):
        before.setdefault(other.strategy.name, set()).add(one.strategy.name)
    assert all(len(names) > 1 for name, names in before.items() if name != "single")


def test_single_is_run_once_and_ddp_on_one_process_too(find):
    study = find(QUESTION + "parts: [{strategies: [single, ddp, zero2], world_sizes: [1, 2]}]\n")
    found = [(run.strategy.name, run.world_size) for run in studies.runs(study)]
    assert found == [("single", 1), ("ddp", 1), ("zero2", 1), ("ddp", 2), ("zero2", 2)]


def test_real_text_comes_from_the_folder_or_the_hub(find, tmp_path):
    bundled, real = (QUESTION + f"text: {text}\nparts: [{{strategies: [single]}}]\n" for text in ("bundled", "real"))
    assert studies.runs(find(real))[0].config.data == "hub"
    assert studies.runs(find(real), tmp_path)[0].config.data_dir == tmp_path
    with pytest.raises(Refusal, match="trains on the bundled sample; leave it out"):
        studies.runs(find(bundled), tmp_path)


def test_a_plan_of_too_many_runs_is_refused_in_a_second(find):
    seeds = ", ".join(map(str, range(100_000)))
    started = time.monotonic()
    for part in (f"seeds: [{seeds}]", "repeats: 999999999999", f"world_sizes: [{seeds[3:]}]"):
        with pytest.raises(Refusal, match="runs are planned, at most 10,000 are run; make several studies of it"):
            find(QUESTION + f"parts: [{{strategies: [ddp], {part}}}]\n")
    assert time.monotonic() - started < 30  # 3 s, on a machine with nothing else to do
