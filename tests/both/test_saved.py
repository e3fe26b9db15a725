"""`zero-study saved`: planted faults, intact checkpoints of every engine, and round trips between engines."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import launching
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from saved_faults import FAULTS, INTACT, QUICK, STEP, UP, Fault, change, to_bin  # noqa: E402

from zero_study import cli  # noqa: E402
from zero_study import saved as saving  # noqa: E402
from zero_study.errors import Refusal  # noqa: E402
from zero_study.saved import dcp, expected, pickles  # noqa: E402
from zero_study.saved.values import same  # noqa: E402


def _write(folder: Path, *words: str) -> None:
    """Train and save under every engine, on two ranks."""
    completed = launching.torchrun([Path(__file__).parents[1] / "saved_program.py", folder, *words], launching.ROOT)
    assert completed.returncode == 0, completed.stderr[-4000:]


@pytest.fixture
def saved_folders(request: pytest.FixtureRequest) -> Path:
    """Return the folder of what every engine saved. A test that is not slow gets one with the folders of QUICK."""
    if request.node.get_closest_marker("slow"):
        return launching.once("saved_folders", _write)
    return launching.once("quick_saved_folders", lambda folder: _write(folder, "quick"))


def cases(rows: Iterable[Any], folders: Callable[[Any], Sequence[str]]) -> list[Any]:
    """Return parameters of a test: those that need other folders than QUICK are slow."""
    marks = [() if {*folders(row)} <= QUICK else pytest.mark.slow for row in rows]
    return [
        pytest.param(*row, marks=mark) if type(row) is tuple else pytest.param(row, marks=mark)
        for row, mark in zip(rows, marks, strict=True)
    ]


@pytest.fixture
def copied(saved_folders: Path, tmp_path: Path):
    """Return a function that copies an intact folder, which a test may then damage."""
    (tmp_path / "saved_folders").symlink_to(saved_folders)

    def copy(source: str) -> Path:
        return Path(shutil.copytree(saved_folders / source, tmp_path / "copy" / source))

    return copy


def _findings(folder: Path, *words: str) -> list[saving.Finding]:
    model = Path(words[1]) if words else None
    from zero_study.saved import against

    read = saving.read(folder, model=model)
    return [finding for each in (*read, *against.cross_check(read)) for finding in each.findings]


@pytest.mark.launches
@pytest.mark.parametrize("fault", cases(FAULTS, lambda fault: [fault.source]), ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, copied, saved_folders, capsys):
    folder = copied(fault.source)
    fault.damage(folder)
    words = ["--model", str(saved_folders / "base")] if fault.source.startswith("adapter") else []
    assert fault.kind in {finding.kind for finding in _findings(folder, *words) if finding.is_wrong}
    capsys.readouterr()  # what DeepSpeed prints when it is imported
    assert cli.run(["saved", str(folder), *words]) == 1
    assert capsys.readouterr().out.startswith("WRONG")


@pytest.mark.launches
@pytest.mark.parametrize("name", cases(INTACT, lambda name: [name]))
def test_nothing_is_found_in_an_intact_folder(name, saved_folders, capsys):
    for words in ([], ["--model", str(saved_folders / "base")]):
        assert _findings(saved_folders / name, *words) == []
        assert cli.run(["saved", str(saved_folders / name), *words]) == 0
        assert capsys.readouterr().out.startswith("Nothing wrong")


@pytest.mark.launches
@pytest.mark.parametrize("layout", ["bin", "old step folder", "one file inside"])
def test_other_layouts_of_intact_folders(layout, copied):
    if layout == "bin":
        folder = copied("base")
        to_bin(folder)
    elif layout == "old step folder":  # `latest` counts, and not the largest number
        folder = copied("zero2")
        shutil.copytree(folder / STEP, folder / "global_step9")
        for path in (folder / "global_step9").glob("*optim*"):
            path.unlink()
    else:
        folder = copied("zero3") / STEP
    assert _findings(folder) == []


# ---------------------------------------------------------------- round trips


def _compared(capsys, folder: Path, other: Path, *words: str) -> tuple[int, dict]:
    """Return the exit status of a comparison, and how many tensors are in each class."""
    capsys.readouterr()
    status = cli.run(["saved", str(folder), "--against", str(other), "--json", *words])
    content = json.loads(capsys.readouterr().out)
    assert content["status"] == status
    keys = ("identical", "identical_after_rounding", "different", "missing", "only_saved")
    return status, {key: sum(len(each[key]) for each in content["compared"]) for key in keys}


IDENTICAL = {"identical_after_rounding": 0, "different": 0, "missing": 0, "only_saved": 0}


@pytest.mark.launches
@pytest.mark.parametrize(
    ("folder", "other", "num_tensors"),
    cases(
        [
            ("zero1", "universal-zero1", 21),
            ("universal-zero1", "zero2-from-universal-zero1", 21),
            ("zero1", "zero2-from-universal-zero1", 21),
            ("zero3", "universal-zero3", 21),
            ("universal-zero3", "zero3-from-universal-zero3", 21),
            ("zero3", "zero3-from-universal-zero3", 21),
            ("fsdp2-dcp", "fsdp2-accelerate", 21),
            ("pretrained", "accelerate-ddp", 20),
        ],
        lambda row: row[:2],
    ),
)
def test_a_round_trip_keeps_every_bit(folder, other, num_tensors, saved_folders, capsys):
    status, counts = _compared(capsys, saved_folders / folder, saved_folders / other)
    assert (status, counts) == (0, {"identical": num_tensors, **IDENTICAL})


@pytest.mark.launches
@pytest.mark.parametrize(
    "source",
    cases(["zero1", "zero2", "zero3", "zero1-fp32", "lora-zero3", "lora-zero2"], lambda name: [name]),
)
def test_tensors_are_those_of_deepspeeds_own_converter(source, saved_folders, capsys):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    theirs = get_fp32_state_dict_from_zero_checkpoint(str(saved_folders / source))
    (read,) = saving.read(saved_folders / source)
    ours = read.whole()
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name].read().float(), theirs[name].float()) for name in theirs)
    result = saving.compare(read, theirs)
    originals = [name for name in theirs if "original_module" in name]  # which modules_to_save does not train
    assert len(result.equal) == len(theirs) - len(originals)


@pytest.mark.launches
@pytest.mark.parametrize("source", ["zero1", "zero3"])
def test_an_export_of_zero_to_transformers(source, saved_folders, tmp_path, capsys):
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict

    # Of tied weights, DeepSpeed cannot write safetensors.
    convert_zero_checkpoint_to_state_dict(str(saved_folders / source), str(tmp_path / "export"), max_shard_size="8KB")
    shutil.copy(saved_folders / "base" / "config.json", tmp_path / "export")
    status, counts = _compared(capsys, tmp_path / "export", saved_folders / source)
    assert (status, counts) == (0, {"identical": 21, **IDENTICAL})


@pytest.mark.launches
def test_an_export_of_dcp_to_transformers(saved_folders, tmp_path, capsys):
    from saved_program import build
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(saved_folders / "fsdp2-dcp", tmp_path / "whole.pt")
    model = build()
    model.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True)["model"])
    model.save_pretrained(tmp_path / "export")
    status, counts = _compared(capsys, tmp_path / "export", saved_folders / "fsdp2-dcp")
    assert (status, counts) == (0, {"identical": 21, **IDENTICAL})


@pytest.mark.launches
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_an_export_of_a_run_of_this_project(strategy, tmp_path, capsys):
    from study.training import export, manifest

    run = launching.run(strategy, checkpoint_every=8)
    checkpoint = manifest.folder_of(run.run_dir / "checkpoints", 8)
    assert _findings(checkpoint) == []
    export.export(manifest.read_complete(checkpoint), tmp_path / "model")
    status, counts = _compared(capsys, tmp_path / "model", checkpoint, "--strict")
    assert (status, counts["identical"]) == (0, 41)
    assert {**counts, "identical": 0} == {"identical": 0, **IDENTICAL}


@pytest.mark.launches
@pytest.mark.parametrize("stage", cases([2, 3], lambda stage: [f"adapter-zero{stage}", f"lora-zero{stage}"]))
def test_an_adapter_is_compared_with_the_training_that_it_is_of(stage, saved_folders, capsys):
    status, counts = _compared(capsys, saved_folders / f"adapter-zero{stage}", saved_folders / f"lora-zero{stage}")
    assert (status, counts) == (0, {"identical": 0, **IDENTICAL, "identical_after_rounding": 9})
    status, counts = _compared(capsys, saved_folders / f"adapter-zero{stage}", saved_folders / "adapter-plain")
    assert status == 1
    assert counts["different"] > 0


@pytest.mark.launches
def test_one_changed_bit_is_a_difference(copied, saved_folders, capsys):
    folder = copied("base")
    tensors = load_file(folder / "model.safetensors")
    tensors[UP].view(torch.int32)[5, 5] ^= 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    status, counts = _compared(capsys, folder, saved_folders / "base")
    assert (status, counts) == (1, {"identical": 20, **IDENTICAL, "different": 1})


@pytest.mark.launches
def test_other_names_cannot_be_compared(copied, saved_folders, capsys):
    folder = copied("accelerate-ddp")
    tensors = load_file(folder / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    status, counts = _compared(capsys, folder, saved_folders / "base")
    assert status == 3
    assert counts["identical"] == 0


# ---------------------------------------------------------------- recordings of `zero-study diff`


RECORDS = """
import sys
from zero_study.engines import extensions
extensions.use_own_folder()
extensions.use_built()  # or DeepSpeed compiles a kernel that no training here calls, for a minute
from zero_study.diff.__main__ import main
main(sys.argv[1:])
"""


@pytest.fixture
def recorded() -> Path:
    """A training that was recorded, and that saved its model three times: see docs/examples/train_save.py."""

    def record(folder: Path) -> None:
        (program := folder / "record.py").write_text(RECORDS)
        words = [program, "--output", "recorded", launching.ROOT / "docs" / "examples" / "train_save.py"]
        completed = launching.torchrun(words, folder, env={"DS_ACCELERATOR": "cpu"})
        assert completed.returncode == 0, completed.stderr[-4000:]

    return launching.once("recorded-and-saved", record)


@pytest.mark.launches
def test_a_checkpoint_is_compared_with_a_recording(recorded, capsys):
    status, counts = _compared(capsys, recorded / "checkpoint", recorded / "recorded")
    assert (status, counts) == (0, {"identical": 20, **IDENTICAL})
    (saved,) = saving.read(recorded / "gathered")
    result = saving.compare_with_recording(saved, recorded / "recorded")
    assert (len(result.close), result.different, result.findings) == (20, {}, [])
    assert result.other.endswith("step 3")  # of the steps 0 to 3


@pytest.mark.launches
def test_a_model_that_was_not_gathered_is_empty(recorded):
    findings = _findings(recorded / "model")
    assert [(finding.kind, finding.names) for finding in findings] == [
        ("empty", ["lm_head.weight", "model.embed_tokens.weight"])
    ]
    (saved,), (whole,) = (saving.read(recorded / name) for name in ("model", "gathered"))
    result = saving.compare(saved, whole)
    assert (len(result.equal), sorted(result.reshaped)) == (19, ["lm_head.weight", "model.embed_tokens.weight"])
    assert [finding.kind for finding in result.findings] == ["partial"]


@pytest.mark.launches
def test_another_training_than_the_recorded_one(recorded):
    (saved,) = saving.read(recorded / "checkpoint")
    name = "model.norm.weight"
    saved.tensors[name] = saving.content.in_memory(name, saved.tensors[name].read() * 1.001, "")
    result = saving.compare_with_recording(saved, recorded / "recorded")
    assert ([*result.different], len(result.equal)) == ([name], 19)
    assert [finding.kind for finding in result.findings] == ["different"]
    saved.step = 9  # which was not recorded
    later = saving.compare_with_recording(saved, recorded / "recorded")
    assert later.findings == []
    assert later.unchecked


# ---------------------------------------------------------------- files that are not trusted


class _Runs:
    """An object whose pickle runs a function."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


@pytest.mark.launches
def test_code_in_a_pickle_is_not_run(copied, tmp_path, capsys):
    folder, trace = copied("zero1"), tmp_path / "trace"
    change(folder / STEP / "mp_rank_00_model_states.pt", lambda content: content.update(client=_Runs(trace)))
    with pytest.raises(Refusal, match="--trust-pickle"):
        cli.run(["saved", str(folder)])
    assert not trace.exists()
    assert cli.run(["saved", str(folder), "--trust-pickle"]) == 0
    assert trace.exists()


@pytest.mark.launches
def test_code_in_metadata_is_not_run(copied, tmp_path):
    folder, trace = copied("fsdp2-dcp"), tmp_path / "trace"
    (folder / ".metadata").write_bytes(pickle.dumps(_Runs(trace)))
    with pytest.raises(Refusal, match="--trust-pickle"):
        saving.read(folder)
    assert not trace.exists()


def test_the_loss_scaler_of_fp16_is_plain_data(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2**16, 2.0, 1000, 1, 1, False, dtype=torch.float16)
    torch.save({"loss_scaler": scaler}, tmp_path / "state.pt")
    assert pickles.load(tmp_path / "state.pt", trust=False)["loss_scaler"].cur_scale == 2**16


def test_numbers_of_numpy_are_plain_data(tmp_path):
    import numpy as np

    torch.save({"loss": np.float64(0.5), "seeds": np.arange(3)}, tmp_path / "state.pt")
    assert pickles.load(tmp_path / "state.pt", trust=False)["loss"] == 0.5


# ---------------------------------------------------------------- refusals and limits


@pytest.mark.parametrize("kind", ["nothing", "a file", "an empty folder"])
def test_a_folder_without_a_checkpoint_is_refused(kind, tmp_path):
    folder = tmp_path / "folder"
    if kind == "a file":
        folder.write_text("")
    elif kind == "an empty folder":
        folder.mkdir()
    with pytest.raises(Refusal, match=str(folder)):
        cli.run(["saved", str(folder)])


@pytest.mark.launches
def test_strict_demands_that_all_was_checked(saved_folders, capsys):
    assert cli.run(["saved", str(saved_folders / "zero3"), "--strict"]) == 3
    assert cli.run(["saved", str(saved_folders / "zero3"), "--strict", "--model", str(saved_folders / "base")]) == 0
    assert cli.run(["saved", str(saved_folders / "base"), "--strict"]) == 0


SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 40, "head_dim": 8,
}  # fmt: skip
ARCHITECTURES = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32},
    "BertForMaskedLM": SMALL,
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    "BartForConditionalGeneration": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 40},
    "GPTNeoXForCausalLM": SMALL,  # transformers writes its head under another name than it has
    "MixtralForCausalLM": {**SMALL, "num_local_experts": 2},  # and its experts one by one
    "Gemma3ForCausalLM": SMALL,
    "ViTForImageClassification": {**SMALL, "image_size": 16, "patch_size": 8},
}


@pytest.mark.computes
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_of_transformers_are_whole(name, tmp_path, monkeypatch):
    import transformers

    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**ARCHITECTURES[name])).bfloat16()
    model.save_pretrained(tmp_path / "whole")
    (whole,) = saving.read(tmp_path / "whole")
    assert (whole.findings, whole.unchecked) == ([], [])
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    del tensors[max(tensors, key=lambda name: tensors[name].numel())]
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    (lacking,) = saving.read(tmp_path / "whole")
    assert {finding.kind for finding in lacking.findings} == {"missing"}


def test_a_folder_of_which_nothing_can_be_read_is_not_fine(tmp_path, capsys):
    for name in ("layer_00-model_00-model_states.pt", "mp_rank_00_model_states.pt"):  # of a pipeline
        (tmp_path / name).write_bytes(b"")
    assert cli.run(["saved", str(tmp_path)]) == 3
    assert "Not checked: " in capsys.readouterr().out


def test_a_model_of_unknown_architecture_is_not_checked():
    for config, reason in (
        ({}, "architecture"),
        ({"architectures": ["NoSuchModel"], "model_type": "no_such"}, "no_such"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "auto_map": {"AutoModel": "m.py"}}, "code"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": {}}, None),
    ):
        if reason is None:
            assert expected.from_config({**config, "num_hidden_layers": 1}).layouts
        else:
            with pytest.raises(expected.NotKnown, match=reason):
                expected.from_config(config)


@pytest.mark.parametrize(
    ("shape", "chunks", "is_whole"),
    [
        ((4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))], True),
        ((4, 2), [((0, 0), (4, 1)), ((0, 1), (4, 1))], True),
        ((4, 2), [((0, 0), (4, 2)), ((4, 0), (0, 2))], True),
        ((), [((), ())], True),
        ((0,), [], True),
        ((4, 2), [((0, 0), (2, 2))], False),
        ((4, 2), [((0, 0), (2, 2)), ((1, 0), (2, 2))], False),
        ((4, 2), [((0, 0), (2, 2)), ((3, 0), (2, 2))], False),
        ((4, 2), [], False),
    ],
)
def test_parts_cover_a_tensor_exactly(shape, chunks, is_whole):
    assert (dcp._coverage(shape, chunks) is None) == is_whole
