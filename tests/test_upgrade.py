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
from study.engines import locks, upgrade
from study.engines.conformance import committed
from study.engines.doctor import checkup, examine
from study.errors import Refusal

HISTORY = json.loads(Path(__file__).with_name("upgrade_history.json").read_text())
EVIDENCE = (launching.ROOT / "reports" / "conformance" / "README.md").read_text()


def alarms(package: str, old: str, new: str) -> list[upgrade.Change]:
    return [change for change in upgrade.compare({package: old}, {package: new}) if change.alarms]


# ---------------------------------------------------------------- history


@pytest.mark.parametrize("case", HISTORY["regressions"], ids=lambda case: "/".join(case["thread"].split("/")[-3:]))
def test_history(case):
    said = [alarm.summary for alarm in alarms(case["package"], case["old"], case["new"])]
    assert any(re.search(case["line"], line) for line in said) == (case["by"] != "missed")
    if case["by"] == "rule":  # downwards it is another upgrade, and says the same
        assert alarms(case["package"], case["new"], case["old"])


def test_the_page_has_recall_and_precision_as_they_are():
    by = [case["by"] for case in HISTORY["regressions"]]
    inside, rule = len(by) - by.count("outside"), by.count("rule")
    assert f"**{inside - by.count('missed')} of {inside}**" in EVIDENCE
    assert f"{rule} of the {rule + by.count('missed')}" in EVIDENCE
    pairs = [(name, *pair) for name, one in upgrade.index()["packages"].items() for pair in pairwise(one["releases"])]
    defaults = [(p, new, alarm.id) for p, old, new in pairs for alarm in alarms(p, old, new) if alarm.kind == "default"]
    harmless = {(name, *one.split(" ")) for name, keys in HISTORY["not_training"].items() for one in keys}
    assert harmless <= {*defaults}
    assert f"{len(defaults) - len(harmless)} of {len(defaults)} defaults" in EVIDENCE
    assert f"{sum(bool(alarms(*pair)) for pair in pairs)} of {len(pairs)} pairs" in EVIDENCE


def test_faults_of_torch_are_those_of_the_matrices():
    wrong = set()
    for version, matrix in committed.read("torch").items():
        of_fsdp2 = (cell["verdict"] for name, cell in matrix["cells"].items() if name.startswith("fsdp2"))
        wrong |= {version} if "wrong" in of_fsdp2 else set()
    (fault,) = (fault for fault in upgrade.known_faults() if fault.id == "fsdp2-gloo-sum")
    assert wrong == {version for version in committed.released("torch") if fault.is_in(version)}


# ---------------------------------------------------------------- locks


LOCKS = {
    "uv.lock": '[[package]]\nname = "deepspeed"\nversion = "0.17.5"\n[[package]]\nname = "me"\n',
    "pylock.toml": '[[packages]]\nname = "deepspeed"\nversion = "0.17.5"\n',
    "poetry.lock": '[[package]]\nname = "DeepSpeed"\nversion = "0.17.5"\n[package.dependencies]\ntorch = "*"\n',
    "requirements.txt": '# deepspeed==1.0\n--index-url https://x/y\nDeepSpeed[dev] == 0.17.5 ; python_version > "3"\n',
    "frozen.txt": "deepspeed==0.17.5 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\nmine @ file:///x\n-e ./mine\n",
    "hashes.txt": "deepspeed==0.17.5 --hash=sha256:00\n",
    "marked.txt": "\ufeffdeepspeed==0.17.5\n",
    "including.txt": "-r frozen.txt\n",
    "environment.yml": "dependencies:\n- python=3.11\n- pip:\n  - deepspeed==0.17.5\n",
    "conda.yaml": "dependencies:\n- conda-forge::deepspeed=0.17.5=py311_cuda\n- numpy\n",
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_read(tmp_path, name):
    for each in (name, "frozen.txt"):
        (tmp_path / each).write_text(LOCKS[each], encoding="utf-8")
    read = upgrade.read_lock(tmp_path / name)
    assert (read.pins, read.unread) == ({"deepspeed": "0.17.5"}, {})


def test_what_powershell_writes_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes("deepspeed==0.17.5\r\n".encode("utf-16"))
    assert upgrade.read_lock(tmp_path / "a.txt").pins == {"deepspeed": "0.17.5"}


UNREAD = {
    "an address": "deepspeed @ git+https://github.com/deepspeedai/DeepSpeed.git@v0.15.0",
    "a source tree": "-e git+https://github.com/deepspeedai/DeepSpeed.git@0123abc#egg=deepspeed",
    "a source tree without a name": "-e git+https://github.com/deepspeedai/DeepSpeed.git@0123abc",
    "a wheel": "https://x/deepspeed-0.15.0-py3-none-any.whl",
    "a wheel here": "./wheels/deepspeed-0.15.0-py3-none-any.whl",
    "a lower bound": "deepspeed>=0.15",
    "a range": "deepspeed>=0.18.6,<0.19.0",
    "a prefix": "deepspeed==0.18.*",
    "a name alone": "deepspeed",
    "no requirement": "deepspeed==0.18.1 or so",
    "one for each platform": "deepspeed==0.18.1; sys_platform == 'linux'\ndeepspeed==0.18.2; sys_platform != 'linux'",
    "an include that is not there": "-r no_such_file.txt",
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("changes", ["OLD", "NEW"])
def test_what_cannot_be_read_is_named_and_fails(tmp_path, capsys, name, changes):
    """Beside another pin that is alike, which alone would be fine."""
    alike = "trl==1.16.0\n"
    old, new = (f"{alike}{UNREAD[name] if changes == side else 'deepspeed==0.19.8'}\n" for side in ("OLD", "NEW"))
    (tmp_path / "old.txt").write_text(old)
    (tmp_path / "new.txt").write_text(new)
    assert cli.run(["upgrade", str(tmp_path / "old.txt"), str(tmp_path / "new.txt")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert UNREAD[name].splitlines()[0].partition(";")[0] in out or "deepspeed" in out
    assert changes in out


@pytest.mark.parametrize(
    "entry",
    [
        'version = "0.18.1"\nsource = { git = "https://x/DeepSpeed" }',
        'version = "0.18.1"\n[package.source]\ntype = "git"\nurl = "x"',
        'source = { editable = "." }',
        'version = "0.18.1"\nsource = { registry = "x" }\n[[package]]\nname = "deepspeed"\nversion = "0.18.2"',
    ],
)
def test_a_lock_of_what_is_no_release_is_named_and_the_rest_compared(tmp_path, entry):
    (tmp_path / "uv.lock").write_text(
        f'[[package]]\nname = "torch"\nversion = "2.12.0"\n[[package]]\nname = "deepspeed"\n{entry}\n'
    )
    read = upgrade.read_lock(tmp_path / "uv.lock")
    assert (read.pins, list(read.unread)) == ({"torch": "2.12.0"}, ["deepspeed"])
    assert upgrade.not_compared(read, read) == []  # in both files alike: it is no change


def test_a_package_that_is_gone_is_no_release_that_is_fine(tmp_path, capsys):
    (tmp_path / "old.txt").write_text("deepspeed==0.19.8\ntrl==1.16.0\n")
    (tmp_path / "new.txt").write_text("trl==1.16.0\n")
    assert cli.run(["upgrade", str(tmp_path / "old.txt"), str(tmp_path / "new.txt")]) == 1
    assert "deepspeed 0.19.8 is in OLD but not in NEW" in capsys.readouterr().out


@pytest.mark.parametrize(
    "version", ["0.19.8+g1234567", "0.19.8rc1", "0.19.8.dev20260801", "0.19.8.post1", "0.19.8.dev1+cu126"]
)
def test_what_is_no_final_release_is_unknown(version):
    (change,) = [one for one in alarms("deepspeed", "0.19.7", version) if one.kind == "unknown"]
    assert version in change.summary


PRERELEASES = {
    "a nightly": "2.13.0.dev20260801+cu130",
    "a release candidate": "2.13.0rc2",
    "an alpha of NVIDIA's images": "2.13.0a0+5228986c39.nv26.05",
}


@pytest.mark.parametrize("version", PRERELEASES.values(), ids=PRERELEASES)
@pytest.mark.parametrize("name", ["new.txt", "poetry.lock", "uv.lock"])
def test_an_upgrade_to_a_prerelease_is_unknown_and_fails(tmp_path, capsys, version, name):
    """A prerelease has the numbers of a release, and need not have its faults and defaults."""
    (tmp_path / "old.txt").write_text("torch==2.12.0\n")
    entry = f'[[package]]\nname = "torch"\nversion = "{version}"\n'
    (tmp_path / name).write_text(f"torch=={version}\n" if name == "new.txt" else entry)
    assert cli.run(["upgrade", str(tmp_path / "old.txt"), str(tmp_path / name)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"torch 2.12.0 -> {version}" in out
    assert f"torch {version} is not a final release" in out


def test_releases_are_ordered_as_versions_and_not_as_texts():
    change = upgrade.Change("torch", "fault", "x", "x", introduced="2.9.0", fixed="2.10.0")
    assert [change.is_in(version) for version in ("2.8.1", "2.9", "2.9.1+cpu", "2.10.0", "2.10.0rc1")] == [
        False, True, True, False, False,
    ]  # fmt: skip
    assert not change.is_in("main")


INLINE_HASHES = """\
torch==2.12.0 ; python_full_version >= '3.11' --hash=sha256:0a --hash=sha256:0b
    # via accelerate
deepspeed==0.17.5 --hash=sha256:0c
trl==1.16.0 \\
    --hash=sha256:0d \\
    --hash=sha256:0e
"""
POETRY = """\
[[package]]
name = "torch"
version = "2.12.0"
optional = false
files = [{file = "torch-2.12.0-cp311-none-any.whl", hash = "sha256:0a"}]
[package.dependencies]
filelock = "*"
[package.source]
type = "legacy"
url = "https://download.pytorch.org/whl/cu130"
reference = "pytorch"

[[package]]
name = "deepspeed"
version = "0.17.5"

[[package]]
name = "trl"
version = "1.16.0"
[package.extras]
deepspeed = ["deepspeed (>=0.14.4)"]

[metadata]
lock-version = "2.1"
"""


@pytest.mark.parametrize(("name", "text"), [("hashes.txt", INLINE_HASHES), ("poetry.lock", POETRY)])
def test_what_tools_write_is_read_in_full(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    lock = upgrade.read_lock(tmp_path / name)
    assert lock == locks.Lock({"torch": "2.12.0", "deepspeed": "0.17.5", "trl": "1.16.0"})


@pytest.mark.parametrize("version", ["2.12.0+cpu", "2.12.0+cu130", "2.12.0+rocm7.1"])
def test_a_build_of_a_release_is_the_release(version):
    assert upgrade.why_unknown("torch", version) is None
    assert alarms("torch", "2.12.0", version) == []


def test_other_packages_are_named_and_no_failure(tmp_path, capsys):
    (tmp_path / "old.txt").write_text("trl==1.16.0\npeft==0.17.0\n")
    (tmp_path / "new.txt").write_text("trl==1.16.0\npeft==0.18.0\n")
    assert cli.run(["upgrade", str(tmp_path / "old.txt"), str(tmp_path / "new.txt")]) == 0
    assert "Nothing is known about their releases: peft" in capsys.readouterr().out


def test_a_pair_in_a_gap_is_not_said_to_have_what_the_gap_has():
    """Neither version was examined, and what changed around them may have changed before or after."""
    found = upgrade.compare({"trl": "0.16.0"}, {"trl": "0.16.1"})
    assert {change.kind for change in found if change.alarms} == {"unknown"}


def test_a_fault_of_two_packages_comes_with_either():
    both = {"torch": "2.12.0", "deepspeed": "0.19.2"}

    def strict(old, new):
        return [one.how for one in upgrade.compare(old, new) if one.id == "strict-schedulers"]

    assert strict({**both, "torch": "2.9.1"}, both) == ["comes"]
    assert strict({"torch": "2.12.0"}, both) == ["comes"]
    assert strict({"torch": "2.9.1"}, {"torch": "2.12.0"}) == []
    assert strict(both, {**both, "torch": "2.13.0"}) == []


def test_lines_fit_the_width():
    old, new = locks.Lock({"transformers": "4.45.2"}), locks.Lock({"transformers": "5.23.0"})
    lines = upgrade.text(upgrade.compare(old.pins, new.pins), old, new, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert re.match(r"\d+ of \d+ known changes", lines[0])


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("a.txt", "peft>=1.0\n", "pins none of torch"),
        ("uv.lock", "[[package]\n", "cannot be read as a lock file"),
        ("uv.lock", "package = 3\n", "pins none of"),
        ("environment.yml", "- x\n", "pins none of"),
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
        ("deepspeed==0.17.5", "deepspeed==0.17.6", 1, "New fault: zero2 in fp32"),
        ("deepspeed==0.19.8", "deepspeed==0.99.0", 1, "deepspeed 0.99.0 is unknown: releases 0.16.0 to"),
        ("transformers==5.18.0", "transformers==5.18.1", 1, "5.18.1 itself was not examined, only the releases"),
        ("torch==2.13.0", "torch==2.13.0\ntrl==1.16.0\ntransformers==4.56.1", 1, "requires transformers>=4.56.2"),
    ],
)  # fmt: skip
def test_the_status_is_for_ci(tmp_path, capsys, old, new, status, line):
    for name, text in (("old.txt", old), ("new.txt", new)):
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("old.txt", "new.txt")]
    assert cli.run(["upgrade", *paths, "--output", str(tmp_path / "changes.json")]) == status
    assert line in re.sub(r"\s+", " ", capsys.readouterr().out)
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
    with pytest.raises(Refusal, match=r"--for trl==1: .*deepspeed==VERSION"):
        examine.examine(path, "trl==1")


def test_doctor_alone_names_what_is_known_of_the_installed_releases(monkeypatch):
    monkeypatch.setattr(
        checkup.importlib.metadata, "version", lambda package: {"deepspeed": "0.18.1"}.get(package, "99")
    )
    checks = {(check.name, check.verdict) for check in checkup._known_bad()}
    assert {("known of deepspeed", "note"), ("known of torch", "unknown")} <= checks
