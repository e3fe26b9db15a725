"""`zero-study why` states what recordings of PyTorch show: calls of ranks, memory, and the time of kernels."""

import gzip
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from zero_study.errors import Refusal
from zero_study.terminal import GIB
from zero_study.why import flight_recorder, memory_snapshot, profiler_trace

# ---------------------------------------------------------------- the flight recorder


def call(number, kind="all_reduce", size=4, state="completed", group=("0", "default_pg"), **other):
    """Return a call as PyTorch 2.10 records it. `record` sets its record_id."""
    return {
        "pg_id": 0, "process_group": group, "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number,
        "profiling_name": f"nccl:{kind}", "input_sizes": [[size]], "output_sizes": [[size]], "input_dtypes": ["Float"],
        "output_dtypes": ["Float"], "state": state, "retired": state == "completed", "is_p2p": False,
        "frames": [
            {"filename": "/lib/torch/distributed/distributed_c10d.py", "line": 9, "name": "wrapper"},
            {"filename": "/home/me/train.py", "line": number, "name": "step"},
        ],
    } | other  # fmt: skip


def write(folder: Path, calls_of_ranks, first=0, groups=None):
    """Write the files of some ranks. `groups` has the ranks of each group."""
    config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in (groups or {}).items()}
    for rank, calls in calls_of_ranks.items():
        entries = [each | {"record_id": first + number} for number, each in enumerate(calls)]
        content = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return folder


def refusal(function, path):
    with pytest.raises(Refusal) as refused:
        function(path)
    assert len(str(refused.value)) < 500
    return str(refused.value)


def the_fact(folder, id):
    (fact,) = flight_recorder.facts(folder)
    assert (fact.id, fact.kind, fact.certainty) == (id, "hang", "computed")
    return fact


SAME = [call(1), call(2, "all_gather")]
WAITS = call(3, "reduce_scatter", 12, "started")


@pytest.mark.launches
def test_a_rank_that_is_one_call_behind_is_named(tmp_path):
    fact = the_fact(write(tmp_path, {0: [*SAME, WAITS], 1: SAME, 2: [*SAME, WAITS]}), "hang/recorded-calls")
    assert "rank 1 had not made this call" in fact.happened
    for shown in ("call 3", "reduce_scatter", "[12]", "train.py:3", "ends with call 2", "train.py:2"):
        assert shown in fact.happened
    assert not fact.is_open
    assert "3 ranks" in fact.basis
    assert "different" not in fact.happened


@pytest.mark.launches
def test_a_rank_without_any_call_is_named(tmp_path):
    other = call(1, group=("5", "tp"), state="started")
    calls = {0: [*SAME, WAITS], 1: [], 2: [*SAME, WAITS]}
    fact = the_fact(write(tmp_path, calls, groups={"0": [0, 1, 2]}), "hang/recorded-calls")
    assert "rank 1 had not made this call" in fact.happened
    assert "call 1" in fact.happened
    assert "rank 1 has no call of this group" in fact.happened
    write(tmp_path, {1: [other]}, groups={"5": [1, 3]})  # it waits for a rank of another group
    first, second = flight_recorder.facts(tmp_path)
    assert "group 5" in first.happened or "group 5" in second.happened
    assert "no recording of rank 3" in first.happened


@pytest.mark.launches
def test_a_missing_file_is_named_and_nothing_is_concluded(tmp_path):
    write(tmp_path, {rank: [*SAME, WAITS] for rank in (0, 1, 3)}, groups={"0": [0, 1, 2, 3, 4]})
    fact = the_fact(tmp_path, "hang/recorded-waiting")
    assert "no recording of ranks 2, 4" in fact.happened
    assert "All" not in fact.happened
    assert fact.is_open


@pytest.mark.launches
def test_a_missing_file_is_named_if_no_call_waits(tmp_path):
    assert "rank 1" in the_fact(write(tmp_path, {0: SAME, 2: SAME}), "hang/recorded-waiting").happened


@pytest.mark.launches
def test_all_ranks_wait_in_the_same_call(tmp_path):
    write(tmp_path, {rank: [*SAME, WAITS, call(4)] for rank in range(4)}, groups={"0": [0, 1, 2, 3]})
    fact = the_fact(tmp_path, "hang/recorded-waiting")
    assert "All 4 ranks" in fact.happened
    assert "call 3" in fact.happened
    assert fact.is_open
    assert "network" not in fact.happened


@pytest.mark.launches
def test_a_group_with_unknown_ranks_may_have_more_ranks(tmp_path):
    """Gloo does not record the ranks of its groups."""
    fact = the_fact(write(tmp_path, {rank: [*SAME, WAITS] for rank in range(2)}), "hang/recorded-waiting")
    assert "All" not in fact.happened


@pytest.mark.launches
def test_equal_recordings_without_a_waiting_call_show_nothing(tmp_path):
    assert flight_recorder.facts(write(tmp_path, {0: SAME, 1: SAME})) == []


@pytest.mark.launches
@pytest.mark.parametrize(
    "other",
    [call(3, "broadcast", 12), call(3, "reduce_scatter", 13), call(3, "reduce_scatter", 12, input_dtypes=["Half"])],
    ids=["kind", "size", "type"],
)
def test_different_calls_with_the_same_number(other, tmp_path):
    fact = the_fact(write(tmp_path, {0: [*SAME, WAITS], 1: [*SAME, other], 2: [*SAME, WAITS]}), "hang/recorded-calls")
    assert "ranks 0, 2 made reduce_scatter" in fact.happened
    assert "rank 1 made" in fact.happened
    assert not fact.is_open


@pytest.mark.launches
@pytest.mark.parametrize(
    "kind",
    ["all_to_all", "alltoall_base", "gather", "scatter", "ALLGATHER_coalesced", "_broadcast_oop", "all_to_all_v"],
)
def test_sizes_may_differ_between_ranks(kind, tmp_path):
    assert flight_recorder.facts(write(tmp_path, {0: [call(1, kind, 5)], 1: [call(1, kind, 6)]})) == []


@pytest.mark.launches
def test_sizes_may_differ_in_coalesced_calls_and_in_shape(tmp_path):
    calls = {rank: [call(1, size=5 + rank), call(1, "coalesced", 0)] for rank in range(2)}
    assert flight_recorder.facts(write(tmp_path, calls)) == []
    calls = {0: [call(1, input_sizes=[[2, 3]], output_sizes=[[6]])], 1: [call(1, size=6)]}
    assert flight_recorder.facts(write(tmp_path, calls)) == []


@pytest.mark.launches
def test_only_numbers_that_all_recordings_cover_are_compared(tmp_path):
    write(tmp_path, {0: [call(5, "broadcast"), call(6), call(7)]}, first=4)
    write(tmp_path, {1: [call(6), call(7), call(8, state="started")]}, first=5)
    fact = the_fact(tmp_path, "hang/recorded-calls")
    assert "call 8" in fact.happened
    assert "broadcast" not in fact.happened


@pytest.mark.launches
def test_a_rank_whose_old_calls_are_forgotten_is_not_blamed(tmp_path):
    other = call(1, group=("7", "dp"))
    write(tmp_path, {0: [other, call(4, state="started")], 1: [other]}, first=900, groups={"0": [0, 1], "7": [0, 1]})
    fact = the_fact(tmp_path, "hang/recorded-waiting")
    assert "rank 0 made" in fact.happened
    assert "not complete" in fact.happened
    assert "rank 1" not in fact.happened


@pytest.mark.launches
def test_a_group_that_waits_for_a_rank_that_waits_elsewhere_is_a_consequence(tmp_path):
    groups = {"3": [0, 1], "1": [1, 2]}
    outer = call(1, group=("3", "dp"), state="started")
    inner = call(1, "all_gather", group=("1", "tp"), state="started")
    first, second = flight_recorder.facts(write(tmp_path, {0: [outer], 1: [inner], 2: []}, groups=groups))
    assert "group 1 tp" in first.happened
    assert "rank 2 had not" in first.happened
    assert not first.is_consequence
    assert second.is_consequence
    assert "Rank 1 waits in a call of group 1 tp" in second.happened


@pytest.mark.launches
def test_groups_that_wait_for_each_other_are_no_consequences(tmp_path):
    outer, inner = (call(1, group=(name, "dp"), state="started") for name in ("3", "1"))
    found = flight_recorder.facts(write(tmp_path, {0: [outer], 1: [inner]}, groups={"3": [0, 1], "1": [0, 1]}))
    assert [fact.is_consequence for fact in found] == [False, False]


@pytest.mark.launches
def test_a_last_rank_without_calls_is_named_without_a_list_of_ranks(tmp_path):
    assert "rank 1 had not made" in the_fact(write(tmp_path, {0: [WAITS], 1: []}), "hang/recorded-calls").happened


@pytest.mark.launches
def test_a_single_recording_is_a_fact(tmp_path):
    write(tmp_path, {2: [*SAME, WAITS]}, groups={"0": [0, 1, 2]})
    fact = the_fact(tmp_path / "nccl_trace_rank_2", "hang/recorded-waiting")
    assert "call 3" in fact.happened
    assert "ranks 0, 1" in fact.happened
    write(tmp_path, {2: SAME})
    assert "No recorded call waits" in the_fact(tmp_path, "hang/recorded-waiting").happened


@pytest.mark.launches
@pytest.mark.parametrize("is_p2p", [False, True])
def test_calls_in_a_coalesced_one_are_complete_if_its_end_is(is_p2p, tmp_path):
    """PyTorch never updates the state of the calls in it."""
    inner = {0: "send 0->1", 1: "recv 1<-0"} if is_p2p else {0: "_broadcast_oop", 1: "_broadcast_oop"}
    shared = {"is_p2p": is_p2p, "p2p_seq_id": 4}
    calls = {
        rank: [
            call(0, inner[rank], state="scheduled", **shared),
            call(0, "coalesced", 0, "completed", input_sizes=[], output_sizes=[], **shared),
        ]
        for rank in range(2)
    }
    assert flight_recorder.facts(write(tmp_path, calls)) == []
    calls[0][1]["state"] = calls[1][1]["state"] = "started"
    assert "not complete" in the_fact(write(tmp_path, calls), "hang/recorded-waiting").happened


def transfer(kind, state="completed", size=4):
    return call(0, kind, size, state, is_p2p=True, group=("9", "pp"))


@pytest.mark.launches
def test_a_send_without_its_receive(tmp_path):
    groups = {"9": [1, 3]}
    done = {1: [transfer("send 0->1")], 3: [transfer("recv 1<-0", size=5)]}
    write(tmp_path, {rank: [] for rank in (0, 2)}, groups=groups)
    assert flight_recorder.facts(write(tmp_path, done, groups=groups)) == []
    write(tmp_path, {1: [*done[1], transfer("send 0->1", "started")]}, groups=groups)
    fact = the_fact(tmp_path, "hang/recorded-calls")
    assert "call 2 of send 0->1 in group 9" in fact.happened
    assert "rank 3 had not made this call" in fact.happened


@pytest.mark.launches
def test_transfers_are_not_compared_if_old_ones_are_forgotten(tmp_path):
    waits = transfer("send 0->1", "started")
    write(tmp_path, {0: [waits]}, first=7)
    write(tmp_path, {1: [transfer("recv 1<-0"), transfer("recv 1<-0")]})
    waiting, behind = flight_recorder.facts(tmp_path), "had not made"
    assert any("send 0->1" in fact.happened for fact in waiting)
    assert not any("rank 1 " + behind in fact.happened for fact in waiting)


@pytest.mark.launches
def test_calls_of_gloo_are_complete_if_they_are_retired(tmp_path):
    calls = {
        rank: [call(1, state="scheduled", retired=True, profiling_name="gloo:all_reduce")] for rank in range(2)
    }  # fmt: skip
    assert flight_recorder.facts(write(tmp_path, calls)) == []
    calls[1][0] |= {"retired": False}
    assert "not complete on rank 1" in the_fact(write(tmp_path, calls), "hang/recorded-waiting").happened


@pytest.mark.launches
def test_a_recording_of_this_pytorch_is_read(tmp_path):
    """The recorder of gloo writes what that of NCCL writes. A fresh process has recorded no calls."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this PyTorch has no flight recorder for gloo")
    dump = "torch._C._distributed_c10d._dump_fr_trace(True, True, False)"
    command = [sys.executable, "-c", f"import sys, torch; sys.stdout.buffer.write({dump})"]
    recording = subprocess.run(command, capture_output=True, check=True).stdout
    (tmp_path / "rank_0").write_bytes(recording)
    assert "no calls are recorded" in refusal(flight_recorder.facts, tmp_path)


@pytest.mark.launches
@pytest.mark.parametrize("name", ["rank_1", "other"])
def test_two_recordings_of_a_rank_or_a_file_without_rank_are_refused(name, tmp_path):
    content = {"entries": [SAME[0] | {"record_id": 0}]}
    (tmp_path / "rank_0").write_bytes(pickle.dumps(content | {"rank": 0}))
    (tmp_path / name).write_bytes(pickle.dumps(content | ({"rank": 0} if name == "rank_1" else {})))
    assert name in refusal(flight_recorder.facts, tmp_path)


class Runs:
    def __reduce__(self):
        return (print, ("code was executed",))


CYCLE: list[object] = []
CYCLE.append(CYCLE)
HOSTILE = {
    "code": pickle.dumps({"entries": [Runs()], "segments": [Runs()]}),
    "no-pickle": b"not a pickle",
    "empty": b"",
    "truncated": pickle.dumps({"entries": [SAME[0]]})[:-9],
    "deep-list": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "deep-key": b"\x80\x04}" + b")" + b"\x85" * 1_000_000 + b"Ns.",
    "large-memo": b"\x80\x02]r\xff\xff\xff\xffa.",
    "cycle": pickle.dumps({"entries": CYCLE, "segments": CYCLE}),
    "list": pickle.dumps([1, 2]),
    "object": pickle.dumps(Path("x")),
    "bytes": pickle.dumps({b"entries": [], b"segments": []}),
}


@pytest.mark.launches
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_is_refused(content, tmp_path, capfd):
    (tmp_path / "rank_0").write_bytes(content)
    assert "rank_0" in refusal(flight_recorder.facts, tmp_path)
    assert "rank_0" in refusal(memory_snapshot.facts, tmp_path / "rank_0")
    assert "code was executed" not in "".join(capfd.readouterr())


@pytest.mark.launches
def test_strange_texts_of_a_recording_are_escaped(tmp_path):
    strange = call(1, "all\x1b[2J", group=("\x07", "\n"), state="started", input_dtypes=["\x1b"])
    assert the_fact(write(tmp_path, {0: [strange]}), "hang/recorded-waiting").happened.isprintable()


@pytest.mark.launches
@pytest.mark.parametrize(
    "damage",
    [
        {"record_id": "x"}, {"record_id": 10**30}, {"collective_seq_id": "x"}, {"collective_seq_id": 2**70},
        {"profiling_name": 5}, {"profiling_name": b"nccl:all_reduce"}, {"process_group": 7}, {"process_group": ("a",)},
        {"input_sizes": {"a": 1}}, {"input_sizes": [[2**70]]}, {"input_sizes": [[-1]]}, {"input_sizes": [[1.5]]},
        {"input_sizes": [4]}, {"output_sizes": None}, {"input_dtypes": 5}, {"input_dtypes": [[1]]},
        {"input_dtypes": [b"Float"]}, {"state": None}, {"state": 4},
    ],
    ids=lambda damage: f"{next(iter(damage))}-{str(next(iter(damage.values())))[:12]}",
)  # fmt: skip
def test_a_damaged_recording_is_refused(damage, tmp_path):
    entry = call(1) | {"record_id": 0}
    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": [entry]}))
    assert flight_recorder.facts(tmp_path)
    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": [entry | damage]}))
    assert "rank_0" in refusal(flight_recorder.facts, tmp_path)


@pytest.mark.launches
@pytest.mark.parametrize(
    "content",
    [
        {"rank": -1}, {"rank": 2**70}, {"rank": "0"}, {"rank": 10**7}, {"pg_config": 5}, {"pg_config": {"0": None}},
        {"entries": [5]}, {"entries": 5},
    ],
    ids=lambda content: f"{next(iter(content))}-{str(next(iter(content.values())))[:12]}",
)  # fmt: skip
def test_a_damaged_head_of_a_recording_is_refused(content, tmp_path):
    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": [call(1) | {"record_id": 0}]} | content))
    assert "rank_0" in refusal(flight_recorder.facts, tmp_path)


@pytest.mark.launches
@pytest.mark.parametrize(
    "frames", [3, "abc", [5], [{"filename": 4}], [{"filename": "/\x1b[2Jx.py", "line": 3, "name": "f\n"}]]
)
def test_strange_frames_are_left_out(frames, tmp_path):
    fact = the_fact(write(tmp_path, {0: [call(1, state="started", frames=frames)]}), "hang/recorded-waiting")
    assert fact.happened.isprintable()


def test_missing_and_empty_folders_are_refused(tmp_path):
    assert "nowhere" in refusal(flight_recorder.facts, tmp_path / "nowhere")
    assert "no calls" in refusal(flight_recorder.facts, tmp_path)
    assert "nowhere" in refusal(memory_snapshot.facts, tmp_path / "nowhere")
    assert "nowhere" in refusal(profiler_trace.facts, tmp_path / "nowhere")


# ---------------------------------------------------------------- memory


def segment(*blocks, **other):
    """Return a segment. Blocks are pairs of a size in GiB and whether it is allocated."""
    frames = [{"filename": "/x/model.py", "line": 7, "name": "forward"}]
    return {
        "device": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
        "total_size": sum(int(size * GIB) for size, _ in blocks),
        "allocated_size": sum(int(size * GIB) for size, is_allocated in blocks if is_allocated),
        "blocks": [
            {"size": int(size * GIB), "state": "active_allocated" if is_allocated else "inactive", "frames": frames}
            for size, is_allocated in blocks
        ],
    } | other  # fmt: skip


def snapshot(path: Path, segments, *traces):
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": list(traces)}))
    return path


def oom(size):
    return {"action": "oom", "size": int(size * GIB), "device_free": GIB // 2, "stream": 0, "time_us": 1}


@pytest.mark.launches
def test_a_snapshot_states_what_is_allocated_and_free(tmp_path):
    (fact,) = memory_snapshot.facts(snapshot(tmp_path / "s", [segment((2, True), (14, False)), segment((1, False))]))
    assert fact.id == "memory/snapshot"
    for shown in ("17 GiB", "2 GiB", "model.py:7", "15 GiB are free, in 2 pieces", "14 GiB"):
        assert shown in fact.happened
    assert fact.is_open


PIECES = [segment((1, True), (0.5, False)) for _ in range(4)]


@pytest.mark.launches
@pytest.mark.parametrize(
    ("segments", "trace", "is_fragmented"),
    [
        (PIECES, [oom(1)], True),
        (PIECES, [oom(1), {"action": "snapshot"}], True),
        (PIECES, [oom(3)], False),  # not enough
        (PIECES, [oom(1), {"action": "free_completed"}], False),  # not the memory at the error
        (PIECES, [], False),
        ([*PIECES, segment((1.5, False))], [oom(1)], False),
        ([each | {"stream": 7} for each in PIECES], [oom(1)], False),
        ([each | {"segment_type": "small"} for each in PIECES], [oom(1)], False),
        ([each | {"is_expandable": True} for each in PIECES], [oom(1)], False),
        ([each | {"segment_pool_id": (0, 4)} for each in PIECES], [oom(1)], False),
    ],
)
def test_fragmentation_is_computed_from_the_failed_request(segments, trace, is_fragmented, tmp_path):
    (fact,) = memory_snapshot.facts(snapshot(tmp_path / "s", segments, trace))
    assert (fact.id == "memory/snapshot-fragmented") is is_fragmented
    assert fact.is_open is not is_fragmented
    assert bool(fact.changes) is is_fragmented
    if is_fragmented:
        assert "1 GiB failed" in fact.happened
        assert "4 pieces" in fact.because


@pytest.mark.launches
def test_devices_of_a_snapshot_are_separate(tmp_path):
    path = snapshot(tmp_path / "s", [segment((1, True)), segment((3, True), device=2), *PIECES], [], [], [oom(1)])
    first, second = memory_snapshot.facts(path)
    assert "GPU 0" in first.happened
    assert "GPU 2" in second.happened
    assert "3 GiB" in second.happened
    assert "failed" in second.happened
    assert "failed" not in first.happened


@pytest.mark.launches
@pytest.mark.parametrize(
    "damage",
    [{"total_size": value} for value in ("x", None, math.nan, -1, 10**5000, 1.5, 2**70)]
    + [{"blocks": value} for value in (5, None, [3], [{"size": [1], "state": "inactive"}], [{"size": 1}])]
    + [{"device": "x"}, {"allocated_size": b"1"}],
    ids=lambda damage: f"{next(iter(damage))}-{type(next(iter(damage.values()))).__name__}",
)
def test_a_damaged_snapshot_is_refused(damage, tmp_path):
    assert "snap" in refusal(memory_snapshot.facts, snapshot(tmp_path / "snap", [segment((1, True)) | damage]))


@pytest.mark.launches
@pytest.mark.parametrize("trace", [5, [5], [{}], [{"action": "oom"}], [oom(1) | {"size": math.nan}]])
def test_a_snapshot_with_a_damaged_trace_is_refused(trace, tmp_path):
    assert "snap" in refusal(memory_snapshot.facts, snapshot(tmp_path / "snap", [segment((1, True))], trace))


# ---------------------------------------------------------------- traces


def event(start, length, name="gemm", device=0, **other):
    return {
        "ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "pid": device, "tid": 7,
        "args": {"device": device, "stream": 7},
    } | other  # fmt: skip


def trace(path: Path, events):
    content = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", "rcclGenericKernel", "mscclKernel",
        "nvshmemi_barrier_kernel", "void c10d::symmetric_memory::two_shot_all_reduce_kernel<float>",
        "multimem_all_gather_kernel", "sglang::cross_device_reduce_1stage<half>", "Memcpy PtoP (Device -> Device)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_the_shares_of_a_trace(name, suffix, tmp_path):
    events = [
        event(0, 40),
        event(20, 40, name),  # 20 of it are hidden
        event(60, 10, "Memcpy HtoD (Pinned -> Device)", cat="gpu_memcpy"),
        event(70, 5, "Memcpy DtoD (Device -> Device)", cat="gpu_memcpy"),
        event(90, 10),
        event(0, 1000, "aten::mm", cat="cpu_op"),
    ]
    (fact,) = profiler_trace.facts(trace(tmp_path / f"trace{suffix}", events))
    assert (fact.id, fact.certainty, fact.changes) == ("slow/trace", "computed", ())
    assert "computes 55 %" in fact.happened
    assert ") 20 %" in fact.happened
    assert "host 10 %" in fact.happened
    assert "idle 15 %" in fact.happened


def test_the_gpus_of_a_trace_are_separate(tmp_path):
    events = [event(0, 50), event(90, 10), event(0, 100, device=1), event(300, 20, device=1, pid=4711)]
    events += [event(320, 20, device=1, pid=4711)]
    found = [fact.happened for fact in profiler_trace.facts(trace(tmp_path / "t.json", events))]
    shown = [happened.partition("s, ")[2].partition(" of the time")[0] for happened in found]
    assert shown == ["GPU 0 computes 60 %", "GPU 1 computes 100 %", "GPU 1 of process 4711 computes 100 %"]


def kernels(**damage):
    return json.dumps({"traceEvents": [event(number * 10, 5, **damage) for number in range(20)]}).encode()


@pytest.mark.parametrize(
    "content",
    [
        kernels(dur=-5), kernels(dur=math.nan), kernels(ts=math.inf), kernels(ts=10**400), kernels(ts=5, dur=0),
        kernels(ts="x"), kernels(ts=None), kernels(dur=[1]), kernels(args=5), kernels(cat="cpu_op"),
        b'{"traceEvents": [5]}', b'{"traceEvents": {"a": 1}}', b"[]", b"5", b"", b"[" * 100_000, b"\x1f\x8b damaged",
        b'{"traceEvents": [' + b"9" * 5000 + b"]}", gzip.compress(b" " * (1 << 24) + b"[]"),
    ],
)  # fmt: skip
def test_a_damaged_trace_is_refused(content, tmp_path):
    (tmp_path / "trace.json").write_bytes(content)
    assert "trace.json" in refusal(profiler_trace.facts, tmp_path / "trace.json")
