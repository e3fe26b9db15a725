"""What an upgrade changes is said: of history, of locks as people have them, and never "fine" of what is unknown."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import launching
import pytest
import releases

from study import cli
from study.engines import upgrade
from study.engines.conformance import committed
from study.engines.doctor import checkup, examine
from study.errors import Refusal

HISTORY = json.loads(Path(__file__).with_name("upgrade_history.json").read_text())
GUIDE = (launching.ROOT / "docs" / "upgrade.md").read_text()


def alarms(package: str, old: str, new: str) -> list[upgrade.Change]:
    return [change for change in upgrade.compare({package: old}, {package: new}) if change.alarms]


# ---------------------------------------------------------------- history


@pytest.mark.parametrize("case", HISTORY["regressions"], ids=lambda case: "/".join(case["thread"].split("/")[-3:]))
def test_history(case):
    said = [alarm.summary for alarm in alarms(case["package"], case["old"], case["new"])]
    assert any(re.search(case["line"], line) for line in said) == (case["by"] != "missed")
    if case["by"] == "rule":  # downwards it is another upgrade, and says the same
        assert alarms(case["package"], case["new"], case["old"])


def test_the_guide_has_recall_and_precision_as_they_are():
    by = [case["by"] for case in HISTORY["regressions"]]
    inside, rule = len(by) - by.count("outside"), by.count("rule")
    assert f"**{inside - by.count('missed')} of {inside}**" in GUIDE
    assert f"{rule} of the {rule + by.count('missed')}" in GUIDE
    pairs = [(name, *pair) for name, one in upgrade.index()["packages"].items() for pair in pairwise(one["releases"])]
    defaults = [(p, new, alarm.id) for p, old, new in pairs for alarm in alarms(p, old, new) if alarm.kind == "default"]
    harmless = {(name, *one.split(" ")) for name, keys in HISTORY["not_training"].items() for one in keys}
    assert harmless <= {*defaults}
    assert f"{len(defaults) - len(harmless)} of {len(defaults)} defaults" in GUIDE
    assert f"{sum(bool(alarms(*pair)) for pair in pairs)} of {len(pairs)} pairs" in GUIDE


def test_faults_of_torch_are_those_of_the_matrices():
    wrong = set()
    for version, matrix in committed.read("torch").items():
        of_fsdp2 = (cell["verdict"] for name, cell in matrix["cells"].items() if name.startswith("fsdp2"))
        wrong |= {version} if "wrong" in of_fsdp2 else set()
    (fault,) = (fault for fault in upgrade.known() if fault.package == "torch")
    assert wrong == {version for version in committed.released("torch") if fault.is_in(version)}


# ---------------------------------------------------------------- locks


LOCKS = {
    "uv.lock": '[[package]]\nname = "deepspeed"\nversion = "0.17.5"\n[[package]]\nname = "me"\n',
    "pylock.toml": '[[packages]]\nname = "deepspeed"\nversion = "0.17.5"\n',
    "requirements.txt": '-r more.txt\n# deepspeed==1.0\nDeepSpeed[dev] == 0.17.5 ; python_version > "3"\ntrl>=1.0\n',
    "frozen.txt": "deepspeed==0.17.5+cu12 \\\n    --hash=sha256:00\nmine @ file:///x\n",
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_read(tmp_path, name):
    (tmp_path / name).write_text(LOCKS[name])
    assert upgrade.read_lock(tmp_path / name) in ({"deepspeed": "0.17.5"}, {"deepspeed": "0.17.5+cu12"})


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("a.txt", "trl>=1.0\n", "pins none of torch"),
        ("a.txt", "trl==1.0.0\ntrl==1.1.0\n", "pins trl at 1.0.0 and at 1.1.0"),
        ("uv.lock", "[[package]\n", "cannot be read as a lock file"),
        ("uv.lock", "package = 3\n", "pins none of"),
    ],
)
def test_what_is_no_lock_is_refused(tmp_path, name, text, fact):
    (tmp_path / name).write_text(text)
    with pytest.raises(Refusal, match=f"{name}: {fact}"):
        upgrade.read_lock(tmp_path / name)


@pytest.mark.parametrize(
    ("old", "new", "status", "line"),
    [
        ("deepspeed==0.19.6", "deepspeed==0.19.7", 0, "0 of"),
        ("deepspeed==0.17.5", "deepspeed==0.17.6", 1, "! fault   comes  zero2 in fp32"),
        ("deepspeed==0.19.8", "deepspeed==0.99.0", 1, "! unknown comes  deepspeed 0.99.0 is unknown: 0.16.0 to"),
        ("transformers==5.18.0", "transformers==5.18.1", 0, "5.18.1 was not examined: all that changes from 5.18.0"),
        ("torch==2.13.0", "torch==2.13.0\ntrl==1.16.0\ntransformers==4.56.1", 1, "asks for transformers>=4.56.2"),
    ],
)  # fmt: skip
def test_the_status_is_for_ci(tmp_path, capsys, old, new, status, line):
    for name, text in (("old.txt", old), ("new.txt", new)):
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("old.txt", "new.txt")]
    assert cli.run(["upgrade", *paths, "--output", str(tmp_path / "changes.json")]) == status
    assert line in capsys.readouterr().out
    entries = json.loads((tmp_path / "changes.json").read_text())["vulns"]
    assert any(entry["database_specific"]["alarms"] for entry in entries) == bool(status)
    for entry in entries:
        (affected,) = entry["affected"]
        assert affected["package"]["ecosystem"] == "PyPI"
        assert affected["ranges"][0]["events"][0].keys() == {"introduced"}


# ---------------------------------------------------------------- the index, and doctor


def test_defaults_are_read_through_classes_names_and_conditions():
    trainer = "class _Base(TrainingArguments):\n a: int = field(default=1)\n"
    config = "class SFTConfig(_Base):\n b: str = NAME\n if X:\n  NAME = 'y'\nNAME = 'x'\nCLIP_DEFAULT = 0.\n"
    found = releases.defaults([trainer, config, "p.add_argument('--f', default='1')"])
    assert found["SFTConfig"] == {"a": "1", "b": "'x' or 'y'"}
    assert (found["launch"], found["constants"]) == ({"--f": "'1'"}, {"clip": "0.0"})
    after = {"SFTConfig": {"a": "2", "b": "'x' or 'y'", "bf16": "None"}, "KTOConfig": {}}
    own = {"bf16": "False", "seed": "42"}
    said = [["SFTConfig", "a", "1", "2"], ["SFTConfig", "bf16", releases.OWN, "None"]]
    assert releases.changes(found, after, own) == said


@pytest.mark.parametrize(
    ("file", "release", "fact"),
    [("zero2.yaml", "0.18.1", "gradients are lost"), ("zero2.yaml", "0.14.1", "unknown"), ("ddp.yaml", "0.18.1", None)],
)
def test_doctor_names_what_a_release_makes_of_a_file(monkeypatch, file, release, fact):
    monkeypatch.chdir(launching.ROOT)
    path = Path("accelerate_configs") / file
    new = [one for one in examine.examine(path, f"deepspeed=={release}").findings if one.key == "stage"]
    assert [fact in one.message and one.matters for one in new] == ([True] if fact else [])
    with pytest.raises(Refusal, match="--for trl==1: write deepspeed==VERSION"):
        examine.examine(path, "trl==1")


def test_doctor_alone_names_what_is_known_of_the_installed_releases(monkeypatch):
    monkeypatch.setattr(
        checkup.importlib.metadata, "version", lambda package: {"deepspeed": "0.18.1"}.get(package, "99")
    )
    checks = {(check.name, check.verdict) for check in checkup._known_bad()}
    assert {("known of deepspeed", "note"), ("known of torch", "unknown")} <= checks
