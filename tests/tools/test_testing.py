"""zero_study.testing and its plugin of pytest: planted faults fail with their place, and sound trainings pass."""

from __future__ import annotations

import functools
import importlib
import runpy
import subprocess
import sys
import tomllib
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import pytest

from zero_study import testing
from zero_study.errors import Refusal
from zero_study.testing import calling, programs
from zero_study.testing.training import RECORDED_STEPS

EXAMPLES = launching.ROOT / "docs" / "examples"
PLUGIN = ["-p", "zero_study.testing.plugin", "-p", "no:cacheprovider", "-W", "error"]


def trainings() -> Any:
    import testing_trainings  # imports torch

    return testing_trainings


def failure(assertion: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return the message of an assertion that fails."""
    launching.use()
    with pytest.raises(AssertionError) as caught:
        assertion(*arguments, **options)
    assert type(caught.value) is AssertionError  # it is known to be wrong
    return str(caught.value)


# ---------------------------------------------------------------- the same training


@pytest.mark.launches
def test_gradients_that_are_divided_twice():
    """The first difference, in one message: the parameter, the step, the size, and the cause."""
    message = failure(testing.assert_same_training, trainings().divided_twice, strategies=["ddp"])
    assert "First difference: step 1, gradient of 2.bias is 0.5 times as large in B" in message
    assert "the factor is 1/2, and 2 is the number of ranks" in message
    assert "ddp on 2 ranks" in message


@pytest.mark.launches
def test_a_training_that_becomes_wrong_after_many_steps():
    message = failure(testing.assert_same_training, trainings().late, strategies=["ddp"])
    assert "First difference: step 7, gradient of 2.bias is 0.5 times as large in B" in message


@pytest.mark.slow
@pytest.mark.launches
def test_all_steps_of_a_long_sound_training_are_compared():
    launching.use()
    training = functools.partial(trainings().sound, steps=60)
    assert testing.assert_same_training(training, strategies=["ddp", "zero2", "fsdp2"]) == RECORDED_STEPS


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize(
    ("name", "strategy", "expected"),
    [
        ("not_averaged", "ddp", ["gradient of", "gradients were not averaged"]),
        ("raises", "ddp", ["RuntimeError: planted (testing_trainings.py:"]),
        ("always_ddp", "zero2", ["zero2 on 2 ranks was requested", "engine"]),
        ("always_ddp", "fsdp2", ["fsdp2 on 2 ranks was requested", "engine"]),
    ],
)
def test_a_training_with_a_fault(name, strategy, expected):
    message = failure(testing.assert_same_training, getattr(trainings(), name), strategies=[strategy], timeout=30)
    assert [text for text in expected if text not in message] == [], message


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize(("name", "strategies"), [("always_ddp", ["ddp"]), ("by_name", ["ddp"])])
def test_a_sound_training_without_accelerate(name, strategies):
    launching.use()
    testing.assert_same_training(getattr(trainings(), name), strategies=strategies)


@pytest.mark.slow
@pytest.mark.launches
def test_a_training_that_clips():
    launching.use()
    clipping = functools.partial(trainings().sound, clip=0.1)
    testing.assert_same_training(clipping, strategies=["ddp", "zero2"], gradient_clipping=0.1)
    message = failure(testing.assert_same_training, clipping, strategies=["zero2"])
    assert "clip" in message


@pytest.mark.slow
@pytest.mark.launches
def test_a_script_with_arguments():
    """A script is imported by nobody, and has words instead of arguments."""
    launching.use()
    testing.assert_same_training(EXAMPLES / "train_a.py", strategies=["ddp"])
    message = failure(testing.assert_same_training, EXAMPLES / "train_b.py", strategies=["ddp"])
    assert "0.5 times as large in B" in message


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two_steps", "two_steps"),
        ("nothing", "nothing was trained"),
        ("hangs", "not done after 20 s.*assert_never_hangs"),
    ],
)
def test_a_training_that_is_not_known_to_be_the_same(name, message):
    launching.use()
    with pytest.raises(testing.CouldNotBeChecked, match=message):
        testing.assert_same_training(getattr(trainings(), name), strategies=["ddp"], timeout=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 1}, "ranks=1"),
        ({"strategies": []}, "compares nothing"),
        ({"strategies": ["zero9"]}, "zero9"),
        ({"train": "absent.py"}, "absent.py"),
        ({"train": lambda: None}, "top level"),
    ],
    ids=["ranks", "no strategy", "unknown strategy", "no script", "a lambda"],
)
def test_arguments_that_are_refused(options, message):
    with pytest.raises(Refusal, match=message):
        testing.assert_same_training(**{"train": EXAMPLES / "train_a.py", "strategies": ["ddp"], **options})


def test_strategies_of_several_precisions_are_refused(tmp_path):
    text = (launching.ROOT / "accelerate_configs" / "ddp.yaml").read_text()
    half = tmp_path / "half.yaml"
    half.write_text(text.replace("mixed_precision: 'no'", "mixed_precision: bf16"))
    with pytest.raises(Refusal, match="bf16, no"):
        testing.assert_same_training(EXAMPLES / "train_a.py", strategies=["ddp", half])


# ---------------------------------------------------------------- engines that are not installed


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZERO_STUDY_MISSING_ENGINE", raising=False)
    monkeypatch.setattr(programs, "is_installed", lambda package: package != "deepspeed")


@pytest.mark.usefixtures("without_deepspeed")
@pytest.mark.parametrize("assertion", ["assert_same_training", "assert_never_hangs"])
def test_a_missing_engine_skips_with_the_reason_or_fails(assertion, monkeypatch):
    strategy = {"strategies": ["zero2"]} if assertion == "assert_same_training" else {"strategy": "zero2"}
    check = functools.partial(getattr(testing, assertion), EXAMPLES / "train_a.py", **strategy)
    with pytest.raises(unittest.SkipTest, match=r"zero2.*deepspeed is not installed"):
        check()
    with pytest.raises(testing.CouldNotBeChecked, match="deepspeed is not installed"):
        check(missing="fail")
    monkeypatch.setenv("ZERO_STUDY_MISSING_ENGINE", "fail")
    with pytest.raises(testing.CouldNotBeChecked, match="deepspeed is not installed"):
        check()
    with pytest.raises(unittest.SkipTest):
        check(missing="skip")
    with pytest.raises(Refusal, match="skip or fail"):
        check(missing="ignore")


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.usefixtures("without_deepspeed")
def test_what_is_installed_is_compared_before_the_test_is_skipped():
    launching.use()
    with pytest.raises(unittest.SkipTest, match="ddp trained as one process"):
        testing.assert_same_training(trainings().sound, strategies=["ddp", "zero2"])
    assert failure(testing.assert_same_training, trainings().divided_twice, strategies=["zero2", "ddp"])


# ---------------------------------------------------------------- hangs


@pytest.mark.launches
def test_a_hang_names_ranks_and_lines():
    message = failure(testing.assert_never_hangs, EXAMPLES / "train_hang.py", ranks=2)
    assert "HANG: ranks 0 and 1" in message
    assert "rank 0: all_reduce of 4 bytes float32 train_hang.py:21" in message
    assert "rank 1: all_reduce of 5,392 bytes float32 train_hang.py:17" in message


def test_one_rank_is_refused():
    with pytest.raises(Refusal, match="ranks=1"):
        testing.assert_never_hangs(EXAMPLES / "train_hang.py", ranks=1)


@pytest.mark.slow
@pytest.mark.launches
def test_a_check_that_takes_too_long_is_not_passed():
    launching.use()
    with pytest.raises(testing.CouldNotBeChecked, match="did not end within 1 s"):
        testing.assert_never_hangs(EXAMPLES / "train_hang.py", ranks=2, timeout=1)


# ---------------------------------------------------------------- what was saved


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    """Return the folder of a saved model, and the model."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder, model


def test_a_saved_model_is_complete(saved):
    folder, model = saved
    testing.assert_saved_is_complete(folder, model)
    testing.assert_saved_is_complete(folder, trained={f"module.{k}": v for k, v in model.state_dict().items()})


def test_a_saved_model_with_other_values_or_without_a_tensor(saved):
    torch = pytest.importorskip("torch")
    folder, model = saved
    with torch.no_grad():
        model[1].weight += 1
    with pytest.raises(AssertionError, match=r"different: 1\.weight\."):
        testing.assert_saved_is_complete(folder, model)
    more = torch.nn.Sequential(*model, torch.nn.Linear(2, 2))
    with pytest.raises(AssertionError, match=r"2\.weight"):
        testing.assert_saved_is_complete(folder, more)


def test_tensors_of_other_names_are_not_known_to_be_saved(saved):
    folder, model = saved
    with pytest.raises(testing.CouldNotBeChecked, match="no tensor has the same name"):
        testing.assert_saved_is_complete(folder, {"other": model[0].weight})


@pytest.mark.parametrize("trained", [{}, {"weight": 1}, 3], ids=["empty", "a number", "no model"])
def test_what_is_no_model_is_refused(saved, trained):
    with pytest.raises(Refusal, match="trained="):
        testing.assert_saved_is_complete(saved[0], trained)


# ---------------------------------------------------------------- configuration files


def test_a_file_that_does_what_it_says():
    testing.assert_does_what_it_says(launching.ROOT / "accelerate_configs" / "ddp.yaml")


def test_a_file_that_does_not(tmp_path):
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 3, "offload_param": false}}')
    with pytest.raises(AssertionError, match=r"zero_optimization\.offload_param") as caught:
        testing.assert_does_what_it_says(file)
    assert type(caught.value) is AssertionError


def test_a_file_of_an_unknown_kind_is_not_passed(tmp_path):
    file = tmp_path / "other.yaml"
    file.write_text("color: red\n")
    with pytest.raises(testing.CouldNotBeChecked, match=r"other\.yaml"):
        testing.assert_does_what_it_says(file)


# ---------------------------------------------------------------- functions in other processes


def test_a_function_whose_module_has_no_name_there_is_executed_from_its_file(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("def train():\n    return 7\n")
    assert calling.module("__main__", str(path)).train() == 7
    assert calling.module("no_such_package.plain", str(path)).train() == 7
    assert calling.module("launching", str(launching.__file__)) is launching
    del sys.modules["zero_study_test"], sys.modules["no_such_package.plain"]


def _named(folder: str, strategy: str = "single") -> None:
    Path(folder, "strategy").write_text(strategy)


@pytest.mark.parametrize(
    ("function", "arguments", "takes_strategy", "written"),
    [
        (_named, 1, True, "zero3"),
        (_named, 2, False, "given"),
        (functools.partial(_named, strategy="bound"), 1, False, "bound"),
    ],
    ids=["a parameter", "given by position", "bound"],
)
def test_a_function_becomes_a_script(function, arguments, takes_strategy, written, tmp_path, monkeypatch):
    script = programs.script_of(function, [str(tmp_path), "given"][:arguments], tmp_path)
    assert (script.name, script.takes_strategy) == ("_named", takes_strategy)
    monkeypatch.setattr(sys, "argv", [str(script.path), *script.arguments_for("zero3")])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(script.path), run_name="before_forks")
    assert not (tmp_path / "strategy").exists()
    runpy.run_path(str(script.path), run_name="__main__")
    assert (tmp_path / "strategy").read_text() == written


# ---------------------------------------------------------------- the plugin


def run_pytest(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin, with warnings as errors.

    An installed project has loaded the plugin by its entry point, and pytest accepts no plugin twice.
    """
    env = {"PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": None, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return launching.attempt(["python", "-m", "pytest", "-q", *PLUGIN, *words], cwd=folder, env=env)


FIXTURES = """
import os, sys

def test_fixtures(assert_does_what_it_says, assert_same_training, assert_never_hangs, assert_saved_is_complete):
    imported = {"torch", "deepspeed", "accelerate", "numpy", "pydantic"} & set(sys.modules)
    assert not imported
    assert_does_what_it_says("ddp.yaml")
    assert os.environ["ZERO_STUDY_MISSING_ENGINE"] == "fail"

def test_a_skip(monkeypatch, assert_same_training):
    from zero_study.testing import programs
    monkeypatch.setattr(programs, "is_installed", lambda package: False)
    monkeypatch.delenv("ZERO_STUDY_MISSING_ENGINE")
    assert_same_training(os.__file__, strategies=["ddp"])
"""


@pytest.mark.launches
def test_the_plugin_has_fixtures_and_imports_nothing_heavy(tmp_path):
    (tmp_path / "test_it.py").write_text(FIXTURES)
    (tmp_path / "ddp.yaml").write_text((launching.ROOT / "accelerate_configs" / "ddp.yaml").read_text())
    completed = run_pytest(tmp_path, "-rs", "--zero-study-missing", "fail")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "1 passed, 1 skipped" in completed.stdout
    assert "ddp (torch, accelerate are not installed)" in completed.stdout


def test_the_entry_point_is_that_of_the_plugin():
    project = tomllib.loads((launching.ROOT / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["pytest11"].values()
    assert module == "zero_study.testing.plugin"
    assert hasattr(importlib.import_module(module), "pytest_addoption")


@pytest.mark.slow
@pytest.mark.launches
def test_the_examples_pass_and_fail_at_the_same_time(tmp_path):
    """On two workers of pytest-xdist, the sound training passes, and both mistakes fail with their place."""
    names = ("test_training.py", "test_training_wrong.py", "test_training_hang.py")
    for name in names:
        (tmp_path / name).write_text((EXAMPLES / name).read_text())
    completed = run_pytest(tmp_path, "-p", "xdist", "-n", "2", "-rA", *names)
    said = completed.stdout
    assert completed.returncode == 1, said + completed.stderr
    assert "2 failed, 2 passed" in said
    for test in ("test_trains_as_one_process", "test_never_hangs"):
        assert f"PASSED test_training.py::{test}" in said
    assert "every rank trains on the same batch" in said
    assert "First parameter that differs: step 1, gradient of " in said
    lines = (EXAMPLES / "test_training_hang.py").read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if "accelerator.reduce" in text)
    assert f"rank 0: all_reduce of 4 bytes float32 test_training_hang.py:{line}" in said
