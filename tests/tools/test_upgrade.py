"""What an upgrade changes is said: of history, of locks as people have them, and never "fine" of what is unknown."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import launching
import pages
import pytest
import release_defaults
import releases
import yaml
from packaging.specifiers import SpecifierSet

from zero_study import cli
from zero_study.check import uses
from zero_study.conformance import results
from zero_study.doctor import checkup, examine
from zero_study.errors import Refusal
from zero_study.upgrade import changes, faults, locks, release_index, used

HISTORY = json.loads((Path(__file__).parents[1] / "upgrade_history.json").read_text())
HELD_OUT = json.loads((Path(__file__).parents[1] / "upgrade_held_out.json").read_text())
EVIDENCE = (launching.ROOT / "reports" / "conformance" / "README.md").read_text()


def alarms(package: str, old: str, new: str) -> list[changes.Change]:
    return [change for change in changes.compare({package: old}, {package: new}) if change.alarms]


# ---------------------------------------------------------------- history


@pytest.mark.parametrize("case", HISTORY["regressions"], ids=lambda case: "/".join(case["thread"].split("/")[-3:]))
def test_history(case):
    said = [alarm.summary for alarm in alarms(case["package"], case["old"], case["new"])]
    assert any(re.search(case["line"], line) for line in said) == (case["by"] != "missed")
    if case["by"] == "rule":  # downwards it is another upgrade, and says the same
        assert alarms(case["package"], case["new"], case["old"])


@pytest.mark.pages
def test_the_page_has_recall_and_precision_as_they_are():
    by = [case["by"] for case in HISTORY["regressions"]]
    inside, rule = len(by) - by.count("outside"), by.count("rule")
    assert f"**{inside - by.count('missed')} of {inside}**" in EVIDENCE
    assert f"{rule} of the {rule + by.count('missed')}" in EVIDENCE
    pairs = [(name, *pair) for name, one in changes.index().packages.items() for pair in pairwise(one.releases)]
    defaults = [(p, new, alarm.id) for p, old, new in pairs for alarm in alarms(p, old, new) if alarm.kind == "default"]
    harmless = {(name, *one.split(" ")) for name, keys in HISTORY["not_training"].items() for one in keys}
    assert harmless <= {*defaults}
    assert f"{len(defaults) - len(harmless)} of {len(defaults)} defaults" in EVIDENCE
    assert f"{sum(bool(alarms(*pair)) for pair in pairs)} of {len(pairs)} pairs" in EVIDENCE


def test_faults_of_torch_are_those_of_the_matrices():
    wrong = set()
    for version, matrix in results.read("torch").items():
        of_fsdp2 = (cell["verdict"] for name, cell in matrix["cells"].items() if name.startswith("fsdp2"))
        wrong |= {version} if "wrong" in of_fsdp2 else set()
    (fault,) = (fault for fault in changes.known_faults() if fault.id == "fsdp2-gloo-sum")
    assert wrong == {version for version in results.released("torch") if fault.is_in(version)}


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
    "spaces.yml": "dependencies:\n- deepspeed 0.17.5 py311_0\n- python =3.11\n",
    "exact.yml": "dependencies:\n- deepspeed==0.17.5\n",
    "pdm.lock": '[[package]]\nname = "deepspeed"\nversion = "0.17.5"\ngroups = ["default"]\n',
    "Pipfile.lock": json.dumps(
        {"_meta": {"sources": []}, "default": {"deepspeed": {"hashes": ["sha256:00"], "version": "==0.17.5"}}}
    ),
    "conda-lock.yml": "package:\n- name: deepspeed\n  version: 0.17.5\n  manager: pip\n  platform: linux-64\n",
    "pixi.lock": "version: 6\npackages:\n- pypi: https://files.pythonhosted.org/deepspeed-0.17.5.tar.gz\n"
    "  name: deepspeed\n  version: 0.17.5\n- conda: https://conda.anaconda.org/conda-forge/linux-64/python-3.11.9-h0_0.conda\n",
    "uv_pip_freeze.txt": "deepspeed==0.17.5\n-e file:///home/me/mine\n",
    "pip_list.txt": "Package    Version\n---------- -------\ndeepspeed  0.17.5\nmine       0.1     /home/me/mine\n",
    "conda_list.txt": "# packages in environment at /opt/conda:\n#\n# Name  Version  Build  Channel\n"
    "deepspeed  0.17.5  py311_0  conda-forge\n",
    "conda_export.txt": "# platform: linux-64\ndeepspeed=0.17.5=py311_0\n",
    "conda_explicit.txt": "@EXPLICIT\nhttps://conda.anaconda.org/conda-forge/linux-64/deepspeed-0.17.5-py311_0.conda#0123\n",
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_read(tmp_path, name):
    for each in (name, "frozen.txt"):
        (tmp_path / each).write_text(LOCKS[each], encoding="utf-8")
    read = changes.read_lock(tmp_path / name)
    assert (read.pins, read.unread) == ({"deepspeed": "0.17.5"}, {})


BY_PLATFORM = {
    "uv.lock": """
[[package]]
name = "torch"
version = "2.2.2"
source = { registry = "https://pypi.org/simple" }
resolution-markers = ["platform_machine == 'x86_64' and sys_platform == 'darwin'"]
[[package]]
name = "torch"
version = "2.9.1+cu128"
source = { registry = "https://download.pytorch.org/whl/cu128" }
resolution-markers = ["sys_platform == 'linux'", "sys_platform == 'win32'"]
[[package]]
name = "deepspeed"
version = "0.18.1"
""",
    "poetry.lock": """
[[package]]
name = "torch"
version = "2.2.2"
markers = "sys_platform == \\"darwin\\""
[[package]]
name = "torch"
version = "2.9.1+cu128"
markers = "sys_platform != \\"darwin\\""
[[package]]
name = "deepspeed"
version = "0.18.1"
""",
    "pylock.toml": """
[[packages]]
name = "torch"
version = "2.2.2"
marker = "sys_platform == 'darwin'"
[[packages]]
name = "torch"
version = "2.9.1+cu128"
marker = "sys_platform == 'linux'"
[[packages]]
name = "deepspeed"
version = "0.18.1"
""",
    "requirements.txt": "torch==2.2.2 ; sys_platform == 'darwin'\ntorch==2.9.1+cu128 ; sys_platform != 'darwin'\n"
    "deepspeed==0.18.1\n",
    "conda-lock.yml": "package:\n- {name: pytorch, version: 2.2.2, platform: osx-64}\n"
    "- {name: pytorch, version: 2.9.1+cu128, platform: linux-64}\n- {name: deepspeed, version: 0.18.1}\n",
    "pixi.lock": "packages:\n- conda: https://conda.anaconda.org/conda-forge/osx-64/pytorch-2.2.2-py_0.conda\n"
    "- conda: https://conda.anaconda.org/conda-forge/linux-64/pytorch-2.9.1+cu128-py_0.conda\n"
    "- {pypi: https://x/deepspeed-0.18.1.tar.gz, name: deepspeed, version: 0.18.1}\n",
}


@pytest.mark.parametrize("name", BY_PLATFORM)
def test_a_lock_that_pins_by_platform_is_read_for_linux(tmp_path, name):
    (tmp_path / name).write_text(BY_PLATFORM[name])
    read = changes.read_lock(tmp_path / name)
    assert read.pins == {"torch": "2.9.1+cu128", "deepspeed": "0.18.1"}
    assert (read.by_platform, read.unread) == ({"torch": "2.2.2"}, {})


def test_builds_of_one_release_are_the_same_on_every_platform(tmp_path):
    (tmp_path / "uv.lock").write_text(
        '[[package]]\nname = "torch"\nversion = "2.9.1+cpu"\n[[package]]\nname = "torch"\nversion = "2.9.1"\n'
    )
    read = changes.read_lock(tmp_path / "uv.lock")
    assert (read.pins, read.by_platform) == ({"torch": "2.9.1+cpu"}, {})


def test_a_range_of_conda_is_no_release(tmp_path):
    (tmp_path / "environment.yml").write_text("dependencies:\n- pytorch=2.5\n- pip:\n  - trl==1.16.0\n")
    read = changes.read_lock(tmp_path / "environment.yml")
    assert (read.pins, list(read.unread)) == ({"trl": "1.16.0"}, ["torch"])


def test_what_powershell_writes_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes("deepspeed==0.17.5\r\n".encode("utf-16"))
    assert changes.read_lock(tmp_path / "a.txt").pins == {"deepspeed": "0.17.5"}


UNREAD = {
    "an address": "deepspeed @ git+https://github.com/deepspeedai/DeepSpeed.git@v0.15.0",
    "a source tree": "-e git+https://github.com/deepspeedai/DeepSpeed.git@0123abc#egg=deepspeed",
    "a source tree without a name": "-e git+https://github.com/deepspeedai/DeepSpeed.git@0123abc",
    "a lower bound": "deepspeed>=0.15",
    "a range": "deepspeed>=0.18.6,<0.19.0",
    "a prefix": "deepspeed==0.18.*",
    "a name alone": "deepspeed",
    "no requirement": "deepspeed==0.18.1 or so",
    "two releases": "deepspeed==0.18.1\ndeepspeed==0.18.2",
    "an include that is not there": "-r no_such_file.txt",
    "an include of another machine": "-r https://h/base.txt",
    "constraints of another machine": "-c https://h/constraints.txt",
    "an include that is a folder": "-r .",
    "an include that is no text": "-r binary.bin",
    "two releases for two Pythons": 'deepspeed==0.18.1; python_version >= "3.12"\n'
    'deepspeed==0.18.2; python_version < "3.12"',
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("changes", ["OLD", "NEW"])
def test_what_cannot_be_read_is_named_and_fails(tmp_path, capsys, name, changes):
    """Beside another pin that is alike, which alone would be fine."""
    (tmp_path / "binary.bin").write_bytes(b"\x80\x81" * 9)
    alike = "trl==1.16.0\n"
    old, new = (f"{alike}{UNREAD[name] if changes == side else 'deepspeed==0.19.8'}\n" for side in ("OLD", "NEW"))
    (tmp_path / "old.txt").write_text(old)
    (tmp_path / "new.txt").write_text(new)
    assert cli.run(["upgrade", str(tmp_path / "old.txt"), str(tmp_path / "new.txt")]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert UNREAD[name].splitlines()[0].partition(";")[0] in out or "deepspeed" in out
    assert changes in out


@pytest.mark.parametrize(
    "name", [name for name in UNREAD if name not in ("two releases", "two releases for two Pythons")]
)
def test_what_cannot_be_read_in_both_files_alike_is_not_compared(tmp_path, capsys, name):
    """The same text need not mean the same releases: pip takes today's, and an included file can change."""
    (tmp_path / "binary.bin").write_bytes(b"\x80\x81" * 9)
    (tmp_path / "r.txt").write_text(f"trl==1.16.0\n{UNREAD[name]}\n")
    assert cli.run(["upgrade", str(tmp_path / "r.txt"), str(tmp_path / "r.txt")]) == 3
    assert "Could not be compared" in capsys.readouterr().out


COMMIT = "0123456789" * 4
SAME = {
    "a commit": f"deepspeed @ git+https://github.com/deepspeedai/DeepSpeed.git@{COMMIT}\n",
    "two releases for two Pythons": UNREAD["two releases for two Pythons"],
    "another platform": 'deepspeed==0.19.8; sys_platform == "win32"\n',
    "a wheel": "https://x/deepspeed-0.15.1-py3-none-any.whl\n",
    "a release": "deepspeed==0.15.1\n",
}


@pytest.mark.parametrize("line", SAME.values(), ids=SAME)
def test_what_is_certainly_the_same_is_sound(tmp_path, line):
    (tmp_path / "r.txt").write_text(f"trl==1.16.0\n{line}")
    assert cli.run(["upgrade", str(tmp_path / "r.txt"), str(tmp_path / "r.txt")]) == 0


def test_nothing_in_common_is_not_sound(tmp_path, capsys):
    (tmp_path / "old.txt").write_text('deepspeed==0.19.8; sys_platform == "win32"\n')
    assert cli.run(["upgrade", str(tmp_path / "old.txt"), str(tmp_path / "old.txt")]) == 3
    assert "nothing was compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "https://x/deepspeed-0.17.5-py3-none-any.whl#sha256=00",
        "./wheels/deepspeed-0.17.5-py3-none-any.whl",
        "deepspeed @ https://x/deepspeed-0.17.5.tar.gz",
        "deepspeed === 0.17.5",
        "deepspeed==0.17.5 ; python_version >= '3.8'",
        "deepspeed==0.17.5 ; python_version < '3.20'",
    ],
)
def test_an_archive_and_a_marker_that_always_holds_name_a_release(tmp_path, line):
    (tmp_path / "a.txt").write_text(f"{line}\n")
    read = changes.read_lock(tmp_path / "a.txt")
    assert (read.pins, read.unread) == ({"deepspeed": "0.17.5"}, {})


def test_a_wheel_of_flash_attn_is_its_release(tmp_path):
    name = "flash_attn-2.8.3%2Bcu12torch2.8cxx11abiTRUE-cp311-cp311-linux_x86_64.whl"
    (tmp_path / "a.txt").write_text(f"flash-attn @ https://x/{name}\n")
    (version,) = changes.read_lock(tmp_path / "a.txt").pins.values()
    assert changes.why_unknown("flash-attn", version) is None


def test_markers_are_decided_for_the_python_that_is_named(tmp_path):
    text = 'deepspeed==0.19.8; python_version >= "3.12"\ndeepspeed==0.18.9; python_full_version < "3.12.0"\n'
    (tmp_path / "a.txt").write_text(text)
    assert [changes.read_lock(tmp_path / "a.txt", python).pins for python in ("3.12", "3.11", None)] == [
        {"deepspeed": "0.19.8"}, {"deepspeed": "0.18.9"}, {},
    ]  # fmt: skip
    for python in ("twelve", "2.7", "3.99"):
        with pytest.raises(Refusal, match="--python"):
            changes.read_lock(tmp_path / "a.txt", python)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("old.lock", "requirements.txt"), ("old.toml", "including.txt"), ("requirements", "hashes.txt"),
        ("poetry.txt", "poetry.lock"), ("frozen", "uv.lock"), ("conda.txt", "environment.yml"),
        ("a.lock", "pip_list.txt"),
    ],
)  # fmt: skip
def test_a_file_is_recognized_by_its_content(tmp_path, name, key):
    (tmp_path / "frozen.txt").write_text(LOCKS["frozen.txt"])
    (tmp_path / name).write_text(LOCKS[key])
    assert changes.read_lock(tmp_path / name).pins == {"deepspeed": "0.17.5"}


def test_a_list_of_packages_in_json_is_read(tmp_path):
    (tmp_path / "a.json").write_text('[{"name": "deepspeed", "version": "0.17.5"}, 3, {"name": "x", "version": null}]')
    assert changes.read_lock(tmp_path / "a.json").pins == {"deepspeed": "0.17.5"}


def test_pip_lines_of_conda_include_files_beside_their_own(tmp_path, monkeypatch):
    (tmp_path / "base.txt").write_text("deepspeed==0.17.5\n")
    (tmp_path / "e.yml").write_text("dependencies:\n- pip:\n  - -r base.txt\n  - -r e.yml\n")
    monkeypatch.chdir(Path(__file__).parents[1])
    assert changes.read_lock(tmp_path / "e.yml").pins == {"deepspeed": "0.17.5"}


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path, capsys):
    (tmp_path / "old.txt").write_text("torch==2.8.0\nvllm==1.0\n")
    (tmp_path / "new.txt").write_text("torch==2.8.0\x1b[2J\nvllm===1\x1b[2J\n-r \x1b]0;x\x07\n")
    (tmp_path / "poetry.lock").write_text('[[package]]\nname = "torch"\nversion = "2.8.0\\u001b[2J\\n"\n')
    for new in ("new.txt", "poetry.lock"):
        assert cli.run(["upgrade", str(tmp_path / "old.txt"), str(tmp_path / new)]) == 3
        out = capsys.readouterr().out
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)


@pytest.mark.parametrize(
    "text", ["[" * 3000, "a: " + "[" * 3000, '{"default": {"vllm": 3}}', "[[package]]\nname = 3\n", "- \x00"]
)
@pytest.mark.parametrize("name", ["a.txt", "uv.lock", "e.yml"])
def test_odd_files_are_refused_in_one_message(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(Refusal):
        changes.read_lock(tmp_path / name)


@pytest.mark.parametrize(
    ("entry", "is_fixed"),
    [
        ('version = "0.18.1"\nsource = { git = "https://x/DeepSpeed" }', False),
        (f'version = "0.18.1"\nsource = {{ git = "https://x/DeepSpeed?rev=main#{COMMIT}" }}', True),
        ('version = "0.18.1"\n[package.source]\ntype = "git"\nurl = "x"', False),
        (f'version = "0.18.1"\n[package.source]\ntype = "git"\nurl = "x"\nresolved_reference = "{COMMIT}"', True),
        ('source = { editable = "." }', False),
        ('version = "0.18.1"\nsource = { registry = "x" }\n[[package]]\nname = "deepspeed"\nversion = "0.18.2"', True),
    ],
)
def test_a_lock_of_what_is_no_release_is_named_and_the_rest_compared(tmp_path, entry, is_fixed):
    (tmp_path / "uv.lock").write_text(
        f'[[package]]\nname = "torch"\nversion = "2.12.0"\n[[package]]\nname = "deepspeed"\n{entry}\n'
    )
    read = changes.read_lock(tmp_path / "uv.lock")
    assert (read.pins, list(read.unread)) == ({"torch": "2.12.0"}, ["deepspeed"])
    assert (changes.not_compared(read, read) == []) == is_fixed  # the same commit in both files: it is no change


def test_a_package_that_is_gone_is_no_release_that_is_fine(tmp_path, capsys):
    (tmp_path / "old.txt").write_text("deepspeed==0.19.8\ntrl==1.16.0\n")
    (tmp_path / "new.txt").write_text("trl==1.16.0\n")
    assert cli.run(["upgrade", str(tmp_path / "old.txt"), str(tmp_path / "new.txt")]) == 3
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
    assert cli.run(["upgrade", str(tmp_path / "old.txt"), str(tmp_path / name)]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert f"torch 2.12.0 -> {version}" in out
    assert f"torch {version} is not a final release" in out


def test_releases_are_ordered_as_versions_and_not_as_texts():
    change = changes.Change("torch", "fault", "x", "x", introduced="2.9.0", fixed="2.10.0")
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
    lock = changes.read_lock(tmp_path / name)
    assert lock == locks.Lock({"torch": "2.12.0", "deepspeed": "0.17.5", "trl": "1.16.0"})


@pytest.mark.parametrize("version", ["2.12.0+cpu", "2.12.0+cu130", "2.12.0+rocm7.1"])
def test_a_build_of_a_release_is_the_release(version):
    assert changes.why_unknown("torch", version) is None
    assert alarms("torch", "2.12.0", version) == []


def test_other_packages_are_named_and_no_failure(tmp_path, capsys):
    (tmp_path / "old.txt").write_text("trl==1.16.0\nvllm==0.17.0\n")
    (tmp_path / "new.txt").write_text("trl==1.16.0\nvllm==0.18.0\n")
    assert cli.run(["upgrade", str(tmp_path / "old.txt"), str(tmp_path / "new.txt")]) == 0
    assert "nothing is known about them: vllm" in " ".join(capsys.readouterr().out.split())


def test_a_pair_inside_a_minor_version_inherits_nothing():
    """`training_args.py` is the same in 4.57.1 and 4.57.3, and trl 0.16.1 renames keys and fixes one fault."""
    assert alarms("transformers", "4.57.1", "4.57.3") == []
    assert alarms("trl", "0.16.0", "0.16.1") == []


def crashes(name, old, new):
    return [change.how for change in changes.compare(old, new) if change.id == name]


def test_a_crash_of_two_packages_comes_with_either():
    both = {"torch": "2.12.0", "deepspeed": "0.19.2"}
    assert crashes("strict-schedulers", {**both, "torch": "2.9.1"}, both) == ["comes"]
    assert crashes("strict-schedulers", {"torch": "2.12.0"}, both) == ["comes"]
    assert crashes("strict-schedulers", {"torch": "2.9.1"}, {"torch": "2.12.0"}) == []
    tied = {"torch": "2.12.0", "accelerate": "1.13.0"}
    assert crashes("fsdp2-tied", tied, {**tied, "torch": "2.13.0"}) == ["comes"]
    assert crashes("fsdp2-tied", tied, {"torch": "2.13.0", "accelerate": "1.14.0"}) == []


def test_a_crash_of_two_packages_that_stays_is_named_but_is_no_alarm():
    both = {"torch": "2.12.0", "deepspeed": "0.19.2"}
    (change,) = [one for one in changes.compare(both, {**both, "torch": "2.13.0"}) if one.id == "strict-schedulers"]
    assert (change.how, change.alarms) == ("stays", False)
    assert crashes("strict-schedulers", both, both) == []


def test_a_fault_that_came_with_its_feature_is_no_alarm():
    (change,) = [one for one in changes.compare({"trl": "0.13.0"}, {"trl": "0.14.0"}) if one.id == "grpo-mask"]
    assert (change.how, change.alarms) == ("comes", False)


def test_a_change_of_behavior_is_an_alarm_in_both_directions():
    for old, new in (("0.26.2", "0.27.0"), ("0.27.0", "0.26.2")):
        assert "use-reentrant" in [change.id for change in alarms("trl", old, new)]


def test_lines_fit_the_width():
    old, new = locks.Lock({"transformers": "4.45.2"}), locks.Lock({"transformers": "5.23.0"})
    lines = changes.text(changes.compare_locks(old, new), old, new, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert re.match(r"\d+ of \d+ known changes", lines[0])


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("a.txt", "vllm>=1.0\n", "this file pins none of torch"),
        ("uv.lock", "[[package]\n", "cannot be read as a lock file"),
        ("uv.lock", "package = 3\n", "this file pins none of"),
        ("environment.yml", "- x\n", "this file pins none of"),
    ],
)
def test_what_is_no_lock_is_refused(tmp_path, name, text, fact):
    (tmp_path / name).write_text(text)
    with pytest.raises(Refusal, match=f"{name}: {fact}"):
        changes.read_lock(tmp_path / name)


@pytest.mark.parametrize(
    ("old", "new", "status", "line"),
    [
        ("deepspeed==0.19.6", "deepspeed==0.19.6", 0, "0 of 0"),
        ("deepspeed==0.19.6", "deepspeed==0.19.7", 1, "faults end"),
        ("deepspeed==0.17.5", "deepspeed==0.17.6", 1, "New fault: zero2 in fp32"),
        ("deepspeed==0.19.8", "deepspeed==0.99.0", 3, "0.99.0 is unknown, because only the releases from 0.15.1 to"),
        ("transformers==5.18.0", "transformers==5.18.1", 3, "transformers 5.18.1 is unknown"),
        ("torch==2.13.0", "torch==2.13.0\ntrl==1.16.0\ntransformers==4.56.1", 1, "requires transformers>=4.56.2"),
    ],
)  # fmt: skip
def test_the_status_is_for_ci(tmp_path, capsys, old, new, status, line):
    for name, text in (("old.txt", old), ("new.txt", new)):
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("old.txt", "new.txt")]
    assert cli.run(["upgrade", *paths, "--output", str(tmp_path / "changes.json")]) == status
    assert line in re.sub(r"\s+", " ", capsys.readouterr().out)
    content = json.loads((tmp_path / "changes.json").read_text())
    entries = content["vulns"]
    own = [entry["database_specific"] for entry in entries]
    assert any(entry["alarms"] or entry["changes_training"] for entry in own) == bool(status)
    assert content["exit_status"] == status
    assert content["checked"][0]["number"] >= 1
    for entry in entries:
        (affected,) = entry["affected"]
        assert affected["package"]["ecosystem"] == "PyPI"
        assert affected["ranges"][0]["events"][0].keys() == {"introduced"}


# ---------------------------------------------------------------- what ends, and what a training uses


def summary(result: changes.Comparison) -> set[str]:
    return {change.id for change in result.shown if change.changes_training}


def in_use(config=None, script=None, imports=None, stage=None, optimizer=None) -> list[used.Use]:
    return uses.of_options([config] if config else [], [script] if script else [], imports, stage, optimizer)


def between(old: str, new: str, **options) -> changes.Comparison:
    return changes.compare_locks(locks.Lock({"deepspeed": old}), locks.Lock({"deepspeed": new}), in_use(**options))


def test_a_fault_that_ends_changes_training_and_the_factor_comes_first():
    result = between("0.19.5", "0.19.8")
    assert result.verdict.status == 1
    first = result.shown[0]
    assert (first.id, first.how, first.alarms) == ("outputs-of-outputs", "goes", False)
    assert "0.25 times" in first.factor
    text = changes.text(result, locks.Lock({"deepspeed": "0.19.5"}), locks.Lock({"deepspeed": "0.19.8"}), 80)
    assert text.index("0.25 times") < text.index("Muon")


def test_a_fault_of_memory_and_a_crash_that_end_change_no_training():
    old, new = locks.Lock({"peft": "0.18.1"}), locks.Lock({"peft": "0.19.0"})
    gone = {change.id: change for change in changes.compare(old.pins, new.pins) if change.how == "goes"}
    assert not gone["target-parameters-memory"].changes_training
    crashes_that_end = [
        one for one in changes.compare({"deepspeed": "0.18.6"}, {"deepspeed": "0.18.7"}) if one.kind == "crash"
    ]
    assert crashes_that_end
    assert not any(change.changes_training for change in crashes_that_end if change.how == "goes")


def test_a_fault_that_may_also_be_in_old_is_no_known_change():
    old, new = locks.Lock({}, {"deepspeed": '"deepspeed", which names no release'}), locks.Lock({"deepspeed": "0.19.8"})
    result = changes.compare_locks(old, new)
    assert result.verdict.status == 3
    assert {change.how for change in result.changes if change.kind == "fault"} == {"there"}


def test_every_known_fault_has_a_remedy_or_says_that_none_is_known():
    for fault in changes.known_faults():
        remedy = changes.remedy(fault)
        assert remedy.endswith("."), fault.id
        bounds = [f">={fault.fixed}"] if fault.fixed else []
        assert all(bound in remedy for bound in bounds)
        assert fault.remedy in remedy
        assert "unless you need" not in remedy


ZERO3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {}}}
ACCELERATE = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "mixed_precision": "bf16"}


@pytest.mark.parametrize(
    ("content", "options", "concerned"),
    [
        (ZERO3, {}, {"part-outside", "zero3-gather-on-cpu"}),
        (ZERO3 | {"gradient_accumulation_steps": 1}, {}, {"zero3-gather-on-cpu"}),
        (ZERO3 | {"bf16": {"enabled": "auto"}}, {}, {"part-outside", "zero3-gather-on-cpu"}),
        (ZERO3 | {"optimizer": {"type": "Muon"}}, {}, {
            "part-outside", "zero3-gather-on-cpu", "muon-groups", "muon-zero-init", "muon-micro-batches",
        }),
        (ACCELERATE, {"optimizer": "adamw"}, {"part-outside", "zero3-gather-on-cpu"}),
        (None, {"stage": 3, "optimizer": "paged_adamw_8bit"}, {"part-outside", "zero3-gather-on-cpu"}),
        ({"distributed_type": "FSDP"}, {}, set()),
        (None, {"imports": "peft,deepspeed,numpy"}, None),
        (None, {"imports": "torch"}, set()),
    ],
)  # fmt: skip
def test_what_cannot_concern_a_training_is_left_out_and_counted(tmp_path, content, options, concerned):
    path = tmp_path / ("c.yaml" if content and "distributed_type" in content else "c.json")
    if content is not None:
        path.write_text(json.dumps(content))
        options = options | {"config": path}
    result = between("0.19.5", "0.19.8", **options)
    everything = between("0.19.5", "0.19.8")
    assert summary(result) == (summary(everything) if concerned is None else concerned)
    assert len(result.shown) + sum(map(len, result.left_out.values())) == len(everything.shown)
    locked = [locks.Lock({"deepspeed": version}) for version in ("0.19.5", "0.19.8")]
    text = changes.text(result, *locked, 80)
    assert ("are left out" in text) == bool(result.left_out)


SCRIPTS = {
    "sft": ("from trl import SFTTrainer, SFTConfig\nmodel.eval()\nx = {'role': 'system'}\n", False),
    "dpo": ("import trl\ntrainer = trl.DPOTrainer(model)\n", True),
    "derived": ("from ours import OurDPOTrainer\nimport trl\n", True),
    "own class": ("from trl import SFTTrainer\nclass MyTrainer(SFTTrainer): ...\nMyTrainer()\n", False),
    "by name": ("import trl\nx = getattr(trl, 'DPOTrainer')\n", True),
    "documented": ('"""Not DPOTrainer."""\nimport trl\n', False),
    "module": ("from pieces.part import f\nfrom trl import SFTTrainer\n", True),
}


@pytest.mark.parametrize(("text", "is_concerned"), SCRIPTS.values(), ids=SCRIPTS)
def test_faults_of_trainers_that_a_script_does_not_use_are_left_out(tmp_path, text, is_concerned):
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "part.py").write_text("from . import other\n")
    (tmp_path / "pieces" / "other.py").write_text("from trl import DPOTrainer\n")
    (tmp_path / "train.py").write_text(text)
    old, new = locks.Lock({"trl": "0.13.0"}), locks.Lock({"trl": "0.14.0"})
    result = changes.compare_locks(old, new, in_use(script=tmp_path / "train.py"))
    assert ("dpo-keep-end" in summary(result)) == is_concerned
    assert "dpo-keep-end" in {change.id for change in result.changes}


@pytest.mark.parametrize(
    ("call", "is_concerned"),
    [
        ("AutoModelForCausalLM.from_pretrained(name)", True),
        ("AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)", False),
        ("transformers.AutoModel.from_pretrained(name, torch_dtype=d); AutoTokenizer.from_pretrained(name)", False),
        ("AutoModel.from_pretrained(name, dtype=d); BertModel.from_pretrained(name)", True),
        ("AutoModelForCausalLM.from_config(config)", False),
    ],
)  # fmt: skip
def test_a_fault_ends_in_a_project_when_its_remedy_is_written(tmp_path, call, is_concerned):
    (tmp_path / "train.py").write_text(f"import torch\nfrom transformers import AutoModel\n{call}\n")
    old, new = locks.Lock({"transformers": "4.57.6"}), locks.Lock({"transformers": "5.23.0"})
    result = changes.compare_locks(old, new, in_use(script=tmp_path / "train.py"))
    assert ("dtype-auto" in summary(result)) == is_concerned


@pytest.mark.parametrize(
    ("name", "text", "known"),
    [
        ("a.yaml", "distributed_type: NO\n", ("ddp", None)),  # which YAML reads as false
        ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n", ("deepspeed", 3)),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: {version: 2, offload_params: true}\n", ("fsdp2", None)),
        ("a.json", '{"zero_optimization": {"stage": "2"}}', ("deepspeed", 2)),
    ],
)
def test_the_engine_of_a_file_is_what_doctor_reads(tmp_path, name, text, known):
    (tmp_path / name).write_text(text)
    (use,) = in_use(config=tmp_path / name)
    assert (use.engine, use.stage) == known


@pytest.mark.parametrize(("version", "is_concerned"), [(1, False), (2, True)])
def test_a_fault_of_fsdp2_is_none_of_fsdp1(tmp_path, version, is_concerned):
    (tmp_path / "fsdp.yaml").write_text(f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: {version}}}\n")
    old, new = locks.Lock({"accelerate": "1.12.0"}), locks.Lock({"accelerate": "1.13.0"})
    result = changes.compare_locks(old, new, in_use(config=tmp_path / "fsdp.yaml"))
    assert ("fsdp2-no-upcast" in summary(result)) == is_concerned


@pytest.mark.parametrize("written", ["SFTConfig()", "SFTConfig(gradient_checkpointing=False)"])
def test_a_default_that_every_call_gives_is_no_change(tmp_path, written):
    (tmp_path / "train.py").write_text(f"from trl import SFTConfig\nprint({written})\n")
    old, new = locks.Lock({"trl": "0.15.2"}), locks.Lock({"trl": "1.10.0"})
    result = changes.compare_locks(old, new, in_use(script=tmp_path / "train.py"))
    keys = {change.key for change in result.shown if change.kind == "default"}
    assert ("gradient_checkpointing" in keys) == ("=" not in written)
    assert "beta" not in keys  # of GRPOConfig


def test_packages_that_a_script_does_not_use_need_not_be_compared(tmp_path):
    (tmp_path / "train.py").write_text("import torch, numpy, os\n")
    (tmp_path / "a.txt").write_text("torch==2.12.0\ndeepspeed\n")
    command = ["upgrade", *[str(tmp_path / "a.txt")] * 2]
    assert cli.run(command) == 3
    assert cli.run([*command, "--script", str(tmp_path / "train.py")]) == 0


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"script": "no.py", "imports": "torch"}, "Give one"),
        ({"script": "no.py"}, "cannot be read"),
        ({"script": "wrong.py"}, "cannot be read as a Python script"),
        ({"config": "no.json"}, "cannot be read"),
        ({"config": "list.json"}, "has no keys"),
        ({"config": "other.json"}, "no known tool"),
        ({"config": "ds.json", "stage": 2}, "has stage 3"),
        ({"config": "fsdp.yaml", "stage": 2}, "does not use DeepSpeed"),
        ({"imports": " , "}, "no package"),
    ],
)
def test_options_that_contradict_each_other_or_cannot_be_read_are_refused(tmp_path, options, fact):
    contents = {
        "wrong.py": "def f(:", "list.json": "[]", "other.json": '{"a": 1}', "ds.json": json.dumps(ZERO3),
        "fsdp.yaml": "distributed_type: FSDP\n",
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    named = {key: tmp_path / value if key in ("script", "config") else value for key, value in options.items()}
    with pytest.raises(Refusal, match=fact):
        in_use(**named)


def test_classes_with_the_same_changes_are_named_once():
    old, new = (
        locks.Lock({"trl": "0.12.0", "transformers": "4.45.2"}),
        locks.Lock({"trl": "1.16.0", "transformers": "5.23.0"}),
    )
    text = changes.text(changes.compare_locks(old, new), old, new, 80)
    assert re.search(r"and \d+ more\s+classes", text)
    assert text.count("CPOConfig") < 40


def test_conditions_of_faults_are_known_keys_and_faults_that_were_only_read_say_so():
    by_id = {(fault.package, fault.id): fault for fault in changes.known_faults()}
    for fault in by_id.values():
        for key, values in {**fault.needs, **fault.file}.items():
            assert key == "engine" or "." in key or key == "gradient_clipping", fault.id
            assert isinstance(values, list), fault.id
    for key in (("deepspeed", "zero2-bf16-used-twice"), ("transformers", "router-loss-times-ranks")):
        assert by_id[key].evidence == "read"
        assert "not measured" in changes._item(by_id[key])
    assert [by_id["deepspeed", "zero2-bf16-used-twice"].is_in(version) for version in ("0.19.3", "0.19.6")] == [
        True,
        False,
    ]
    assert by_id["transformers", "router-loss-times-ranks"].is_in("5.23.0")


# ---------------------------------------------------------------- the index, and doctor


def test_defaults_are_read_through_classes_names_and_conditions():
    trainer = "class _Base(TrainingArguments):\n a: int = field(default=1)\n"
    config = "class SFTConfig(_Base):\n b: str = NAME\n if X:\n  NAME = 'y'\nNAME = 'x'\nCLIP_DEFAULT = 0.\n"
    sources = {"a.py": trainer, "b.py": config, "c.py": "p.add_argument('--f', default='1')"}
    read = release_defaults.defaults(sources)
    assert read["SFTConfig"] == {"a": "1", "b": "'x' or 'y'"}
    assert (read["launch"], read["constants"]) == ({"--f": "'1'"}, {"clip": "0.0"})


def test_signatures_and_constructors_are_read():
    source = "class AdamW(Optimizer):\n def __init__(self, p, lr=1e-3, *, fused=None): ...\n"
    function = "def fully_shard(module, mesh=None, _private=1): ...\ndef _hidden(x=1): ...\n"
    read = release_defaults.defaults({"a.py": source, "b.py": function})
    assert read["AdamW"] == {"lr": "0.001", "fused": "None"}
    assert read["fully_shard"] == {"mesh": "None"}
    assert "_hidden" not in read


IN_EFFECT = {
    "if": "class C:\n x: int | None = None\n def __post_init__(self):\n  if self.x is None:\n   self.x = 512\n",
    "if expression": "class C:\n x: int = None\n def f(self):\n  self.x = self.x if self.x is not None else 512\n",
    "or": "class C:\n x: int | None = None\n def f(self):\n  self.x = self.x or 512\n",
    "a constructor": "class C:\n def __init__(self, x=None):\n  x = 512 if x is None else x\n",
    "arithmetic": "class C:\n x: int = 1 << 9\n",
    "an enumeration": "class E(Enum):\n A = 512\nclass C:\n x: int = E.A\n",
}


@pytest.mark.parametrize("source", IN_EFFECT.values(), ids=IN_EFFECT)
def test_the_value_in_effect_counts_and_not_its_spelling(source):
    assert release_defaults.defaults({"a.py": source})["C"] == {"x": "512"}


def test_what_depends_on_other_settings_is_not_the_value_in_effect():
    source = "class C:\n x: bool = None\n def f(self):\n  self.x = not self.y if self.x is None else self.x\n"
    assert release_defaults.defaults({"a.py": source})["C"] == {"x": "None"}


def test_a_key_that_only_warns_is_deprecated():
    source = "class C:\n x: int = None\n def f(self):\n  if self.x is not None:\n   warnings.warn('x is deprecated')\n"
    assert release_defaults.defaults({"a.py": source})["C"] == {"x": changes.DEPRECATED}


PACKAGE = release_index.Package({}, {}, {}, frozenset({"tested"}))


@pytest.mark.parametrize(
    ("key", "before", "after", "is_same"),
    [
        ("x", "0", "0.0", True),
        ("x", "0", "1", False),
        ("x", "'a'", "['a']", True),
        ("x", "None", "[]", True),
        ("x", "False", "None", True),
        ("tested", "False", "None", False),
        ("x", "False", "True", False),
        ("x", changes.REQUIRED, "1", True),
        ("bf16", changes.OWN, "False", True),
        ("bf16", changes.OWN, "None", False),
    ],
)
def test_a_change_of_spelling_is_no_change(key, before, after, is_same):
    assert changes._is_same(changes._DefaultChange(key, before, after), PACKAGE) == is_same


def release(**defaults):
    return releases.Release("2026-01-01", {}, {"C": defaults}, frozenset())


def test_the_index_stores_each_value_once_and_gives_back_every_release():
    """0.10.0 comes after 0.9.0 although it is before it as a text, and was read before it."""
    all_releases = {"0.10.0": release(a="2"), "0.9.0": release(a="1", b="x"), "0.9.1": release(a="1")}
    content = releases.packed(all_releases)
    assert content["defaults"]["C"] == {"a": [("0.9.0", "1"), ("0.10.0", "2")], "b": [("0.9.0", "x"), ("0.9.1", None)]}
    package = release_index.Package(**{**content, "distinguished": frozenset()})
    assert list(package.releases) == ["0.9.0", "0.9.1", "0.10.0"]
    for version, one in all_releases.items():
        assert package.defaults_at(version) == one.defaults
    assert {version: one.defaults for version, one in releases.unpacked(package).items()} == {
        version: one.defaults for version, one in all_releases.items()
    }


def test_requirements_of_packages_of_the_index_are_read():
    metadata = "Requires-Dist: torch>=2.0\nRequires-Dist: numpy>1\nRequires-Dist: peft>=0.8; extra == 'peft'\n"
    metadata += "Requires-Dist: datasets!=2.5.0; extra == 'testing'\n"
    assert releases.requirements(metadata) == {"torch": ">=2.0", "peft": ">=0.8"}


def test_the_index_has_all_packages_and_most_of_their_patch_releases():
    packages = changes.index().packages
    assert {*releases.READ} == {*packages}
    assert {"4.57.1", "4.57.2", "4.57.3"} <= {*packages["transformers"].releases}
    assert {"0.16.0", "0.16.1"} <= {*packages["trl"].releases}
    assert release_index.INDEX.stat().st_size < 1_000_000
    for name, package in packages.items():
        newest = list(package.releases)[-1]
        assert sum(map(len, package.defaults_at(newest).values())) > 10, name


# ---------------------------------------------------------------- the list of faults


def test_each_listed_fault_is_dated_between_its_releases_and_has_a_thread():
    ids = set()
    for fault in changes.known_faults():
        first, end = (
            faults.base_release(version or other) for version, other in ((fault.introduced, "0"), (fault.fixed, "999"))
        )
        assert first < end, fault.id
        assert (fault.package, fault.id) not in ids
        ids.add((fault.package, fault.id))
        assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", url) for url in fault.threads)
        for required in fault.beside.values():
            SpecifierSet(required)
    listed = [entry for entry in json.loads(faults.FILE.read_text()) if "engines" not in entry]
    assert {entry["package"] for entry in listed} == {*changes.index().packages}
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", entry["date"]) for entry in listed)
    without_thread = {entry["id"] for entry in listed if not entry["threads"]}
    # These were found by this project.
    assert without_thread == {
        "adafactor-fsdp2", "adafactor-partitions", "autocast-fp16-clipping", "autocast-fp16-clipping-absent",
        "autocast-fp16-clipping-stage-3", "cpu-lion-zero-gradient", "fsdp2-used-twice", "muon-biases",
        "muon-later-steps", "muon-loss-scale", "zero3-reentrant-twice",
    }  # fmt: skip


def test_the_list_of_faults_is_read_where_only_the_requirements_of_deepspeed_are_installed(monkeypatch):
    """DeepSpeed requires packaging, but not PyYAML."""
    for name in ("yaml", "accelerate", "transformers", "click"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("zero_study.upgrade.faults_alone", faults.__file__)
    assert spec
    assert spec.loader
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, alone)  # where dataclasses look up the module of a class
    spec.loader.exec_module(alone)
    assert [fault.id for fault in alone.measured()] == [fault.id for fault in faults.measured()]
    assert alone.find(
        deepspeed="0.18.3", zero_stage=0, offload="none", precision="bf16", sums_in_fp32=False, micro_batches=1
    )


def test_entries_without_effect_name_keys_that_exist():
    """A key that is in no release is a misspelling."""
    for entry in yaml.safe_load(changes.NO_EFFECT.read_text()):
        keys = {
            name
            for cls, members in changes.index().packages[entry["package"]].defaults.items()
            for key in members
            for name in (key, f"{cls}.{key}")
        }
        assert {*entry["keys"]} <= keys
        assert entry["reason"]


# ---------------------------------------------------------------- the site's page of faults


def test_the_page_of_faults_says_what_is_measured_hidden_and_not_reproduced(monkeypatch, tmp_path):
    moved = {"1": 1.0, "5": 0.99, "20": 0.98}
    record = {"autocast-fp16-clipping": {"1": 0.84, "5": 0.91, "20": 0.95}, "fp16-growing-scale": moved}
    effects = {
        name: {"release": "0.19.8", "adamw": {"moved": each}, "adamw_large": {"moved": each}}
        for name, each in record.items()
    }
    (tmp_path / "effects.json").write_text(json.dumps({"faults": effects}))
    for path, number in ((tmp_path / "effects.json", 4), (tmp_path / "none.json", 0)):
        monkeypatch.setattr(pages, "EFFECTS", path)
        of_release = dict(part.split("\n", 1) for part in pages.faults_of_deepspeed().split("\n## DeepSpeed ")[1:])
        assert of_release.keys() == set(changes.index().packages["deepspeed"].releases)
        rows = of_release["0.19.8"].splitlines()[3:]
        assert sum("(0.19.8)" in row for row in rows) == number
        assert sum("*nearly hidden*" in row for row in rows) == (number > 0)
        assert "*never reproduced here*" in of_release["0.17.5"]
        assert "--release deepspeed==0.18.2 --only zero2/fp32/2-ranks/accumulation-2" in of_release["0.18.2"]
        faults_of_release = [fault for fault in pages._faults_of_deepspeed() if fault.is_in("0.19.8")]
        assert len(rows) == len(faults_of_release)


def test_programs_that_show_faults_exist():
    named = {fault.program for fault in faults.read() if fault.program}
    assert named
    assert all((launching.ROOT / name).is_file() for name in named)


# ---------------------------------------------------------------- held-out pairs


FOUND = [case for case in HELD_OUT["changes"] if "line" in case]


@pytest.mark.parametrize("case", FOUND, ids=lambda case: case["commit"])
def test_held_out_changes_that_were_found_are_found(case):
    lines = [alarm.summary for alarm in alarms(case["package"], case["old"], case["new"])]
    assert any(re.search(case["line"], line) for line in lines)


def test_held_out_harmless_pairs_are_not_reported():
    reported = [pair for pair in HELD_OUT["harmless"] if alarms(pair["package"], pair["old"], pair["new"])]
    assert reported == []
    assert f"**{len(FOUND)} of {len(HELD_OUT['changes'])}**" in EVIDENCE
    assert f"{len(HELD_OUT['harmless'])} harmless pairs" in EVIDENCE


# ---------------------------------------------------------------- doctor


@pytest.mark.parametrize(
    ("file", "release", "fact"),
    [("zero2.yaml", "0.18.1", "gradients are lost"), ("zero2.yaml", "0.14.1", "unknown"), ("ddp.yaml", "0.18.1", None)],
)
def test_doctor_names_what_a_release_makes_of_a_file(monkeypatch, file, release, fact):
    monkeypatch.chdir(launching.ROOT)
    path = Path("accelerate_configs") / file
    new = [one for one in examine.examine(path, f"deepspeed=={release}").findings if one.key == "stage"]
    assert [fact in one.message for one in new] == ([True] if fact else [])
    assert [one.matters for one in new] == ([fact != "unknown"] if fact else [])
    for refused in (["numpy==1.26.4"], ["deepspeed"], [f"deepspeed=={release}", "deepspeed==0.19.8"]):
        with pytest.raises(Refusal, match=r"--for \w+.*deepspeed==0\.19\.8|Name one of them"):
            examine.examine(path, *refused)


AUTOCAST = {"enabled": True, "dtype": "float16"}


@pytest.mark.parametrize(
    ("settings", "stage", "affected"),
    [
        ({"torch_autocast": AUTOCAST}, 1, {"0.19.3", "0.19.8"}),
        ({"torch_autocast": AUTOCAST, "gradient_clipping": 1.0}, 2, {"0.17.2", "0.17.6", "0.19.2", "0.19.3", "0.19.8"}),
        ({"torch_autocast": AUTOCAST, "gradient_clipping": 1.0}, 3, {"0.17.6", "0.19.2", "0.19.3", "0.19.8"}),
        ({"torch_autocast": {**AUTOCAST, "dtype": "fp16"}, "gradient_clipping": 0}, 3, set()),
        ({"torch_autocast": {**AUTOCAST, "enabled": False}, "gradient_clipping": 1.0}, 2, set()),
        ({"torch_autocast": {**AUTOCAST, "dtype": "bfloat16"}, "gradient_clipping": 1.0}, 2, set()),
        ({"torch_autocast": AUTOCAST, "gradient_clipping": 1.0}, 0, set()),
        ({"gradient_clipping": 1.0}, 2, set()),
        ({"fp16": {"enabled": True}, "gradient_clipping": 1.0}, 2, set()),
    ],
)
def test_fp16_under_deepspeeds_autocast_is_named_for_files_that_have_it(settings, stage, affected, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**settings, "zero_optimization": {"stage": stage}, "train_batch_size": 4}))
    said = "clipped while they are still multiplied by the loss scale"
    for version in ("0.17.1", "0.17.2", "0.17.6", "0.19.2", "0.19.3", "0.19.8"):
        found = examine.examine(path, f"deepspeed=={version}").findings
        assert any(said in finding.message for finding in found) == (version in affected), version
        if "gradient_clipping" in settings:  # a program may fill it in, so upgrade names all faults otherwise
            shown = between("0.17.1", version, config=path).shown
            assert any(said in change.summary for change in shown) == (version in affected), version
    now = [finding for finding in examine.examine(path).findings if finding.key == "torch_autocast.dtype"]
    assert any(finding.matters for finding in now) == ("0.19.8" in affected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", None])
def test_bf16_under_deepspeeds_autocast_is_named_for_files_that_have_it(dtype, tmp_path):
    path = tmp_path / "ds.json"
    section = {"torch_autocast": {"enabled": True, "dtype": dtype}} if dtype else {}
    path.write_text(json.dumps({**section, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}))
    found = [finding.message for finding in examine.examine(path, "deepspeed==0.17.5").findings]
    assert any("65,536 times too large" in message for message in found) == (dtype == "bfloat16")
    ended = [change.id for change in between("0.17.5", "0.17.6", config=path).shown if change.how == "goes"]
    assert (
        {"autocast-norm", "autocast-bf16-scaler"} <= {*ended} if dtype == "bfloat16" else "autocast-norm" not in ended
    )


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "zero_optimization": {"stage": 0}}


@pytest.mark.parametrize(
    ("release", "stage", "clipping", "fact"),
    [
        ("0.19.6", 0, 0, "plain SGD"),
        ("0.19.7", 0, 0, None),
        ("0.19.6", 3, 0, "trained by AdamW"),
        ("0.19.8", 2, None, "divided by its norm"),
        ("0.19.8", 2, 0.5, "clipped instead of the gradient"),
        ("0.19.8", 2, 0, None),
    ],
)
def test_doctor_names_listed_faults_that_a_file_has(tmp_path, release, stage, clipping, fact):
    content = MUON | {"zero_optimization": {"stage": stage}}
    content |= {} if clipping is None else {"gradient_clipping": clipping}
    (tmp_path / "muon.json").write_text(json.dumps(content))
    findings = examine.examine(tmp_path / "muon.json", f"deepspeed=={release}").findings
    messages = [finding.message for finding in findings if finding.is_about_release and "Muon" in finding.message]
    assert any(fact in message for message in messages) if fact else messages == []


OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("optimizer", "more", "fact", "is_affected"),
    [
        ("Lion", {"zero_optimization": OFFLOADED}, "gradient and momentum are zero", True),
        ("Lion", {"zero_optimization": {"stage": 2}}, "gradient and momentum are zero", False),
        ("Adafactor", {"zero_optimization": {"stage": 1}}, "one flat vector", True),
        ("Adafactor", {"zero_optimization": {"stage": 0}}, "one flat vector", False),
        ("SGD", {"fp16": {"enabled": True}}, "SGD almost stops", True),
        ("SGD", {"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": "0"}}, "SGD almost stops", True),
        ("Muon", {"fp16": {"enabled": True}, "zero_optimization": {"stage": "2"}}, "momentum contains", True),
        ("Muon", {"fp16": {"enabled": True}, "zero_optimization": OFFLOADED}, "momentum contains", False),
        ("SGD", {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "SGD almost stops", False),
        ("SGD", {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "loss scale doubles", True),
        ("SGD", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "loss scale doubles", False),
    ],
)
def test_doctor_names_listed_faults_of_optimizers(tmp_path, optimizer, more, fact, is_affected):
    content = {"optimizer": {"type": optimizer, "params": {"lr": 0.02}}, "gradient_clipping": 1.0, **more}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    findings = examine.examine(tmp_path / "ds.json", "deepspeed==0.19.8").findings
    assert any(fact in finding.message for finding in findings if finding.is_about_release) == is_affected


def test_doctor_alone_names_what_is_known_of_the_installed_releases(monkeypatch):
    monkeypatch.setattr(
        checkup.importlib.metadata, "version", lambda package: {"deepspeed": "0.18.1"}.get(package, "99")
    )
    checks = {(check.name, check.verdict) for check in checkup._known_faults()}
    assert {("known of deepspeed", "note"), ("known of torch", "unknown")} <= checks
