"""`zero-study why` compares what ranks, stacks and tables state, and claims no more than they do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from test_why import falling, first, norms, out_of_memory, steps, waiting

from zero_study.why import answer, log, text
from zero_study.why.cause import Cause
from zero_study.why.setting import Setting

SOUND = Path(__file__).parents[1] / "why" / "sound"


def cause(lines: Sequence[str], **setting: object) -> Cause:
    found = answer.answer_lines(lines, Setting(**setting)).cause
    assert found is not None
    return found


# ---------------------------------------------------------------- dates before the mark of the rank


@pytest.mark.parametrize(
    "date",
    [
        "2026-09-18 19:29:24 ",
        "2026-09-18T19:29:24.950901628Z ",
        "[2026-09-18 19:29:24,123] ",
        "2026-09-18T19:29:24+00:00 ",
    ],
)
def test_a_rank_is_read_behind_a_date(date: str):
    lines = [
        "[rank5]: Traceback (most recent call last):",
        '[rank5]:   File "/workspace/train.py", line 3, in step',
        "[rank5]:     loss.backward()",
        "[rank5]: ValueError: a broken sample",
    ]
    failure = log.read(date + line for line in lines).failures[0]
    assert (failure.rank, failure.kind, failure.frames[0].function) == (5, "ValueError", "step")


def test_a_date_before_a_traceback_without_ranks_is_no_obstacle():
    lines = [
        "Traceback (most recent call last):",
        '  File "/workspace/train.py", line 3, in step',
        "    loss.backward()",
        "ValueError: a broken sample",
    ]
    failure = log.read(f"2026-09-18T19:29:24.95Z {line}" for line in lines).failures[0]
    assert (failure.kind, failure.frames[0].function) == ("ValueError", "step")


def test_other_lines_keep_their_date():
    assert list(log.parts("2026-09-18 19:29:24 step 12: loss 1.5")) == [(None, "2026-09-18 19:29:24 step 12: loss 1.5")]


# ---------------------------------------------------------------- calls that differ between ranks


def test_sizes_that_differ_in_one_call_are_the_cause_although_another_rank_waits_later():
    calls = waiting((1, 40, "ALLREDUCE", 52_000_000), (2, 40, "ALLREDUCE", 9_000_000), (0, 42, "ALLREDUCE", 1))
    found = cause(calls)
    assert found.id == "hang/different-sizes"
    assert "gradients" in found.because
    assert all(number in found.happened for number in ("52,000,000", "9,000,000", "number 42"))


def test_a_broadcast_of_different_sizes_is_of_buffers():
    assert "buffer" in cause(waiting((0, 90, "BROADCAST", 12), (3, 90, "BROADCAST", 48))).because


def test_the_sizes_of_an_all_to_all_may_differ():
    calls = waiting((0, 90, "ALLTOALL_BASE", 4096), (1, 90, "ALLTOALL_BASE", 8192))
    assert "hang/different-sizes" not in {each.id for each in answer.answer_lines(calls).causes}


def test_the_rank_that_had_queued_least_is_behind():
    queued = (
        "[rank{0}]:[E918 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank {0}]  failure detected by "
        "watchdog at work sequence id: {1} PG status: last enqueued work: {2}, last completed work: {3}"
    )
    lines = [
        *waiting((0, 71, "ALLREDUCE", 4096), (1, 72, "BROADCAST", 64)),
        queued.format(0, 71, 90, 70), queued.format(1, 72, 72, 71),
    ]  # fmt: skip
    found = cause(lines)
    assert found.id == "hang/rank-behind"
    assert "Rank 1 is behind" in found.because


# ---------------------------------------------------------------- a silent rank

BAR = "Epoch 1: 100%|██████████| 500/500 [08:20<00:00,  1.00s/it]"


def test_unequal_batches_are_only_possible_if_a_rank_is_silent_at_the_end_of_an_epoch():
    calls = waiting(*((rank, 2000, "ALLREDUCE", 52_000_000) for rank in (0, 1, 3)))
    found = answer.answer_lines([BAR, *calls])
    assert found.cause is not None
    assert found.cause.id == "hang/silent-at-end"
    assert "rank 2" in found.cause.happened
    assert "saves" in found.cause.because
    assert all(each.sureness == "possible" for each in found.causes)


def test_unequal_batches_stay_likely_if_all_ranks_waited_at_the_end_of_an_epoch():
    calls = waiting(*((rank, 2000, "ALLREDUCE", 52_000_000) for rank in range(4)))
    found = cause([BAR, *calls])
    assert (found.id, found.sureness) == ("hang/uneven-batches", "likely")


# ---------------------------------------------------------------- start-up


@pytest.mark.parametrize(
    ("stated", "number"),
    [
        ("CUDA_VISIBLE_DEVICES=1", "1"),
        ("export HIP_VISIBLE_DEVICES=0,1,2", "3"),
        ("'CUDA_VISIBLE_DEVICES': '0, 3'", "2"),
    ],
)
def test_the_visible_gpus_that_a_log_states_are_counted(stated: str, number: str):
    found = cause([stated, "RuntimeError: CUDA error: invalid device ordinal"])
    assert found.id == "launch/hidden-gpus"
    assert found.changes[0].startswith(f"start {number}:")


def test_visible_gpus_that_differ_between_processes_are_not_counted():
    lines = ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1", "RuntimeError: CUDA error: invalid device ordinal"]
    assert cause(lines).id == "launch/device-ordinal"
    assert answer.answer_lines(["CUDA_VISIBLE_DEVICES=0,1"]).cause is None


def test_a_connection_to_this_machine_is_not_blamed_on_the_network_between_machines():
    line = "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to ({0}, 29500)."
    assert cause([line.format("localhost")]).id == "hang/connect-to-this-machine"
    assert cause([line.format("10.0.0.7")]).id == "hang/connect"


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: The weights trying to be saved contained shared tensors [{'a.wte.weight', 'b.shared.weight'}] "
        "that are mismatching the transformers base configuration.",
        "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk and potential differences "
        "when loading them again: [{'a.wte.weight', 'b.shared.weight'}].",
    ],
)
def test_the_shared_tensors_that_a_message_names_are_named(message: str):
    happened = cause([message]).happened
    assert "a.wte.weight" in happened
    assert "b.shared.weight" in happened
    assert "shared-tensors" in cause([message.split(" [{")[0].split(" and potential")[0]]).id


def test_a_last_dimension_of_two_is_of_the_classes_only_in_a_training_with_rewards():
    error = "RuntimeError: The size of tensor a (2) must match the size of tensor b (48) at non-singleton dimension 1"
    warning = (
        "Some weights of LlamaForSequenceClassification were not initialized from the model checkpoint at base and are "
        "newly initialized: ['score.weight']"
    )
    assert cause(["trainer: PPOTrainer, ppo_epochs=4", warning, error]).id == "start-up/two-labels"
    assert cause([error]).id == "start-up/shapes-differ"
    assert cause(["trainer: PPOTrainer, ppo_epochs=4", error]).id == "start-up/shapes-differ"


def test_a_look_up_out_of_range_names_positions_and_tokens():
    line = "Indexing.cu:1093: indexSelectSmallIndex: block: [4,0,0] Assertion `srcIndex < srcSelectDimSize` failed."
    found = cause([line])
    assert found.id == "wrong/index-of-embedding"
    assert found.sureness == "possible"
    assert first("Loss.cu:250: nll_loss_forward: Assertion `t >= 0 && t < n_classes` failed.") == "wrong/index"


# ---------------------------------------------------------------- steps


def policy(loss: float, norm: float, spread: float) -> list[str]:
    line = {"loss": loss, "grad_norm": norm, "learning_rate": 1e-6, "reward": 0.4, "reward_std": spread, "kl": 2e-4}
    return [str(line)] * 4


@pytest.mark.parametrize("loss", [0.0, 0.0003, -1e-5])
def test_a_policy_loss_near_0_is_expected_and_the_log_shows_that_it_learns(loss: float):
    found = answer.answer_lines(policy(loss, 0.21, 0.3))
    assert found.is_sound
    assert [each.id for each in found.causes] == ["wrong/loss-zero-of-policy"]
    shown = text.text(found).replace("\n ", "")
    assert "0.21" in shown
    assert "reward_std 0.3" in shown


@pytest.mark.parametrize(("loss", "norm", "spread"), [(0.8, 0.2, 0.3), (0.0, 0.2, 0.0), (0.0, float("nan"), 0.3)])
def test_a_policy_that_the_log_does_not_show_to_learn_gets_no_such_note(loss: float, norm: float, spread: float):
    assert "wrong/loss-zero-of-policy" not in {
        each.id for each in answer.answer_lines(policy(loss, norm, spread)).causes
    }


def test_losses_after_a_gradient_of_nan_tell_whether_the_weights_are_spoiled():
    lines = ["{'loss': 2.1, 'grad_norm': nan, 'learning_rate': 0.0}"]
    spoiled = cause([*lines, "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-06}"])
    sound = cause([*lines, "{'loss': 1.9, 'grad_norm': nan, 'learning_rate': 1e-06}"])
    assert spoiled.id == sound.id == "wrong/gradients-nan"
    assert "in the weights, too" in spoiled.happened
    assert "no NaN" in sound.happened
    assert "learning rate is 0" in spoiled.because


# ---------------------------------------------------------------- memory


def test_a_gpu_full_of_tensors_points_to_long_samples_if_the_states_are_small():
    full = out_of_memory(tried="1.10 GiB", unused="300.00 MiB")
    found = cause(full, model="llama-3.1-8b", strategy="zero3", num_gpus=16)
    assert found.id == "memory/activations-dominate"
    assert "longest samples" in found.changes[0]
    assert found.sureness == "possible"


@pytest.mark.parametrize(
    "setting", [{}, {"model": "llama-3.1-8b"}, {"model": "llama-3.1-8b", "strategy": "zero3", "num_gpus": 2}]
)
def test_activations_are_not_said_to_dominate_if_the_states_are_unknown_or_large(setting: dict):
    found = cause(out_of_memory(tried="1.10 GiB", unused="300.00 MiB"), **setting)
    assert found.id == "memory/too-large"
    assert "tensors of this process" in found.because


def test_a_gpu_that_is_not_full_of_tensors_is_not_said_to_be():
    found = cause(out_of_memory(tried="1.10 GiB", allocated="40.00 GiB", unused="30.00 GiB"))
    assert "tensors of this process" not in found.because


# ---------------------------------------------------------------- stacks of a running process, and tables


def stack(*frames: str, state: str = "active+gil") -> list[str]:
    """Return what py-spy prints for a thread, the innermost frame first."""
    return [f'Thread 57902 ({state}): "MainThread"', *(f"    {frame}" for frame in frames)]


INDUCTOR = stack(
    "wait (threading.py:320)",
    "result (concurrent/futures/_base.py:451)",
    "wait (torch/_inductor/async_compile.py:512)",
    "compile_to_module (torch/_inductor/graph.py:2271)",
    "forward (model/layers.py:77)",
)


@pytest.mark.parametrize(
    ("lines", "caller"),
    [
        (INDUCTOR, "forward (model/layers.py)"),
        (stack("compile_and_jit (cutlass/base_dsl/compiler.py:186)", "rms_norm (ops/norm.py:12)"), "rms_norm"),
        (stack("_write_ninja_file_and_compile (torch/utils/cpp_extension.py:1800)", "load (ops/jit.py:9)"), "load"),
    ],
)
def test_an_active_compiler_is_found_with_the_function_that_called_it(lines: list[str], caller: str):
    found = cause(lines)
    assert found.id == "slow/compiler-is-active"
    assert caller in found.happened
    assert found.sureness == "possible"


@pytest.mark.parametrize(
    "lines",
    [
        [*INDUCTOR, *stack("backward (torch/autograd/graph.py:869)", "step (train.py:3)")],  # the last one counts
        stack("run (triton/runtime/jit.py:612)", "forward (model/layers.py:77)"),  # a ready kernel is started
        stack("compile_wrapper (torch/_dynamo/eval_frame.py:574)", "forward (model/layers.py:77)"),
        [line.replace("active+gil", "idle") for line in INDUCTOR],
    ],
)
def test_a_process_that_does_not_compile_now_is_not_said_to(lines: list[str]):
    assert first(lines) != "slow/compiler-is-active"


TABLE = ["| Length | torch 2.5.1 tokens/s | torch 2.6.0 tokens/s |", "| --- | --- | --- |"]


def test_a_difference_between_releases_that_grows_with_the_length_points_to_attention():
    found = cause([*TABLE, "| 2048 | 5000 | 4500 |", "| 8192 | 5000 | 3000 |"])
    assert found.id == "slow/later-release"
    assert "10 %" in found.happened
    assert "40 %" in found.happened
    assert "attention" in found.because.split("used.")[1]


@pytest.mark.parametrize(
    "rows",
    [
        ["| 2048 | 5000 | 4950 |", "| 8192 | 5000 | 4400 |"],  # not in all rows
        ["| 2048 | 4500 | 5000 |", "| 8192 | 3000 | 5000 |"],  # the later release is faster
    ],
)
def test_a_later_release_that_is_not_slower_in_all_rows_is_no_cause(rows: list[str]):
    assert first([*TABLE, *rows]) is None


@pytest.mark.parametrize("path", sorted(SOUND.glob("*.log")), ids=lambda path: path.stem)
def test_no_new_mechanism_complains_of_a_sound_training(path: Path):
    found = answer.answer([path])
    assert found.num_found == 0
    assert not {each.id for each in found.causes} & {"slow/compiler-is-active", "slow/later-release"}


def test_a_sound_training_behind_dates_and_ranks_stays_sound():
    lines = [f"2026-09-18 19:29:24 [rank0]: {line}" for line in steps(30, loss=falling, grad_norm=norms)]
    assert answer.answer_lines(lines).is_sound
