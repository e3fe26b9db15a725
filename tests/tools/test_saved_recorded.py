"""`zero-study saved --against RECORDING`: the step that a checkpoint names is compared, and a stale one is found."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from zero_study import saved as saving  # noqa: E402
from zero_study.diff.recorded import Entry, Recording  # noqa: E402
from zero_study.diff.sketch import sketch  # noqa: E402
from zero_study.saved import recorded  # noqa: E402
from zero_study.saved.content import in_memory  # noqa: E402

STEPS = 3


def training(learning_rate: float, seed: int = 0, starts_in_16_bit: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return the weights before and after each of three updates, which change each element as Adam does."""
    draws = torch.Generator().manual_seed(seed)
    weights = {f"layers.{at}.weight": torch.randn(48, 32, generator=draws) * 0.02 for at in range(6)}
    weights["norm.weight"] = torch.ones(32)
    if starts_in_16_bit:
        weights = {name: value.bfloat16().float() for name, value in weights.items()}
    steps = [weights]
    for _ in range(STEPS):
        updates = {name: torch.randn(value.shape, generator=draws).sign() for name, value in weights.items()}
        weights = {name: value - learning_rate * updates[name] for name, value in weights.items()}
        steps.append(weights)
    return steps


def record(monkeypatch: pytest.MonkeyPatch, steps: list[dict[str, torch.Tensor]], completed: int = STEPS) -> None:
    """Make these weights a recording."""
    entries = [
        Entry(step, "weights", name, 0, value.numel(), "float32", sketch(value), [])
        for step, weights in enumerate(steps[: completed + 1])
        for name, value in weights.items()
    ]
    recording = Recording(Path("rec"), [entries], {"completed": completed})
    monkeypatch.setattr(recorded.Recording, "read", lambda folder: recording)


def saved(weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, step: int | None = None):
    tensors = {name: in_memory(name, value.to(dtype), "model.safetensors") for name, value in weights.items()}
    return saving.Saved(Path("model"), "Hugging Face", tensors=tensors, step=step)


def kinds(result: saving.Comparison) -> set[str]:
    return {finding.kind for finding in result.findings}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", range(STEPS + 1))
def test_only_the_right_step_fits(dtype, step, monkeypatch):
    steps = training(1e-3)
    record(monkeypatch, steps)
    for listed in (None, *range(STEPS + 1)):
        result = recorded.compare_with_recording(saved(steps[step], dtype, listed), Path("rec"))
        is_right = step == (STEPS if listed is None else listed)
        assert kinds(result) == (set() if is_right else {"stale"}), (listed, result)
        assert result.unchecked == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("learning_rate", [1e-2, 1e-4, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("starts_in_16_bit", [False, True])
def test_a_16_bit_copy_of_the_last_step_is_no_fault(seed, dtype, learning_rate, starts_in_16_bit, monkeypatch):
    """If updates are smaller than the type resolves, the step may be undecided, but it is not another one."""
    steps = training(learning_rate, seed, starts_in_16_bit)
    record(monkeypatch, steps)
    assert kinds(recorded.compare_with_recording(saved(steps[STEPS], dtype), Path("rec"))) == set()


@pytest.mark.parametrize("learning_rate", [1e-2, 1e-4, 3e-5])
def test_16_bit_weights_from_before_the_first_step_are_stale(learning_rate, monkeypatch):
    steps = training(learning_rate)
    record(monkeypatch, steps)
    result = recorded.compare_with_recording(saved(steps[0], torch.bfloat16), Path("rec"))
    assert kinds(result) == {"stale"}


def test_steps_that_16_bits_cannot_tell_apart_are_undecided(monkeypatch):
    steps = training(1e-8)
    record(monkeypatch, steps)
    result = recorded.compare_with_recording(saved(steps[STEPS], torch.bfloat16), Path("rec"))
    assert (kinds(result), len(result.unchecked)) == (set(), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_training_does_not_pass(dtype, monkeypatch):
    record(monkeypatch, training(1e-3))
    for other in (training(2e-3), training(1e-5), training(1e-3, seed=1)):
        result = recorded.compare_with_recording(saved(other[STEPS], dtype), Path("rec"))
        assert kinds(result) & {"different", "stale"}


def test_a_step_after_the_recording_is_unknown(monkeypatch):
    steps = training(1e-3)
    record(monkeypatch, steps)
    for weights in steps:
        result = recorded.compare_with_recording(saved(weights, step=9), Path("rec"))
        assert (result.findings, len(result.unchecked)) == ([], 1)


def test_what_is_not_a_parameter_is_not_unexpected(monkeypatch):
    steps = training(1e-3)
    record(monkeypatch, steps)
    weights = {**steps[STEPS], "norm.running_mean": torch.ones(32), "norm.num_batches_tracked": torch.tensor(3)}
    assert recorded.compare_with_recording(saved(weights), Path("rec")).findings == []
    weights["extra.weight"] = torch.ones(3)
    assert kinds(recorded.compare_with_recording(saved(weights), Path("rec"))) == {"unexpected"}
