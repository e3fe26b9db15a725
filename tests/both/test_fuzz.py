"""Asks for what nobody means: mutated flags, strategies, studies, records, packs, manifests, config.json and claims.

    pytest tests/both/test_fuzz.py --hypothesis-profile=long     5,000 cases of each kind

A case holds where the answer is a result or one line, never a traceback, a warning or a hang; where what is taken means
what was written; and where what is refused has changed no file. Nothing is launched: a run that would be started ends
there.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import io
import json
import random
import re
import resource
import shutil
import signal
import stat
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
import synthetic
import yaml
from hypothesis import given
from hypothesis import strategies as st

from study import config
from study.claims import ledger, verdicts
from study.cli import compare as compare_command
from study.records import find as records
from study.records import pack
from study.run import Run
from study.running import launch, plan, studies
from zero_study import __main__, cli, files
from zero_study.conformance import matrix as conformance_matrix
from zero_study.conformance import results
from zero_study.errors import Refusal, RunFailed
from zero_study.strategy import file, shipped
from zero_study.theory import shapes

SECONDS = 20  # of a processor, for one case

# What is written for a value: traps of YAML, of Python and of file systems, and what is beyond any number.
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, -(10**6), 10**9, 10**12, 10**18, 10**30, 0.0, 0.5, -0.5, 1e-320, 1e30,
    1e308, 8.0,
    "", " ", "0", "1", "2", "010", "0x10", "1:30", "1_000", "1e3", "8.0", "-1", "nan", "inf", "1e400", "1" * 5000, "٣",
    "yes", "no", "true", "null", "auto", "none", "cpu", "nvme", "bf16", "ddp", "zero2", "gpu", "real", "large", "tiny",
    "..", ".", "../../x", "/", "/dev/null", "a/b", "a:b", "lr:a", "CON", "manifest", "x" * 300, "a\nb", "a\x00b", "é😀",
    "\ud800", "%s", "{}", "[", "]", "pdsh", "2026-02-30", [], {}, [[]], [1, 1], ["ddp"], {"a": 1}, [None], [True], [-1],
    "2026-01-01T00:00:00", "\x1b[2J\x1b]0;x\x07", "a\r\u2028\u202eb\x9b", 10**400, "(a+)+$" * 9, "__class__", "nan",
]  # fmt: skip
# What a terminal would act on.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
MOST_MEMORY = 1 << 30  # bytes that one case may add to the peak of this process
# What stands in a text: words that YAML and JSON read otherwise, or not at all.
WORDS = [
    "010", "1:30", "0b1", "1_0", ".inf", ".nan", "~", "yes", "off", "2026-02-30", "!!int x", "!!binary x", "*a",
    "&a [*a]",
    "<<: {}", "? [a]", "NaN", "-Infinity", "1e999", "9" * 5000, "[" * 3000, "{" * 300, '"\\ud800"', '"', "'",
    "\t", "\x00",
    "\ufeff", "---", "...", "#", "%YAML 3.0", "é", "null", "true", "-", ":", ",", "}", "]", "{}", "[]", "1e5", "\u2028",
    "\x85", "\r", "\r\n",
]  # fmt: skip


class Started(BaseException):  # no command may take it for an error
    """A run would be launched now."""


class Broken(AssertionError):
    """A case does not hold."""


# ---------------------------------------------------------------- asking


class Answer:
    """What the command said."""

    def __init__(self, words: list[str]) -> None:
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
        self.started: Run | None = None
        before, sys.argv = sys.argv, ["zero-study", *words]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                __main__.main()
            raise Broken("it ended without a status")
        except SystemExit as end:
            self.status = end.code
        except Started as started:
            self.status, self.started = 0, started.args[0]
        finally:
            sys.argv = before
        for stream in (out, err):
            stream.flush()
        self.out, self.err = (stream.buffer.getvalue().decode(errors="replace") for stream in (out, err))
        if CONTROL.search(self.out + self.err):
            raise Broken(f"control characters reach the terminal: {self.out + self.err!r}")
        if self.status not in (0, 1, 2, 3):
            raise Broken(f"status {self.status}")
        # A line of progress, such as "Tracing the modules of config.json ...", may come first.
        if self.status == 2 and not re.fullmatch(r"(.+ \.\.\.\n)*zero-study:( .+)?\n(  .+\n)*", self.err):
            raise Broken(f"refused in other than one error: {self.err!r}")
        if self.status != 2 and self.err:
            raise Broken(f"said on stderr: {self.err!r}")


def ask(*words: Any) -> Answer:
    """Run one command line in this process; where it is refused nothing may have changed."""
    before = tree()
    answer = Answer([str(word) for word in words])
    if answer.status == 2 and tree() != before:
        raise Broken(f"refused, and changed {sorted(dict(set(tree().items()) ^ set(before.items())))}")
    return answer


def refused(read: Callable[[], Any]) -> Any:
    """What a function reads, None where it refuses in one line."""
    try:
        return read()
    except Refusal as refusal:
        if "\n" in str(refusal):
            raise Broken(f"refused in several lines: {refusal}") from None
        return None


def tree(folder: Path = Path()) -> dict[str, bytes | None]:
    """All that lies in the current folder, and beside it."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.absolute().parent.rglob("*")}


@contextlib.contextmanager
def nothing_starts() -> Iterator[None]:
    """Let nothing start, and no plan read the reports: that is 700 records each time."""

    def start(run: Run, *_: Any, **__: Any) -> Any:
        raise Started(run)

    whole = plan._history

    def own(folder: Path, *others: Any) -> Any:
        with mock.patch.object(plan.files, "ROOT", Path("none")):
            return whole(folder, *others)

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGPROF)
    handlers = {number: signal.getsignal(number) for number in numbers}
    with mock.patch.object(launch, "launch", start), mock.patch.object(plan, "_history", own):
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


# ---------------------------------------------------------------- mutating


def mutated(content: Any, draw: random.Random) -> Any:
    """A copy of a document with one to three changes somewhere in it."""
    content = copy.deepcopy(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(content))
        if draw.randrange(3) == 0:  # else most would be deep inside
            places = [place for place in places if place[0] is content]
        if not places:
            return draw.choice(VALUES)
        holder, key = draw.choice(places)
        what = draw.randrange(8)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[draw.choice([f"{key}s", str(key)[:-1], "unknown", "", "é", "schema_version"])] = holder.pop(key)
        elif what == 2:
            holder[key] = [holder[key]]
        elif what == 3:
            other, its = draw.choice(places)
            with contextlib.suppress(LookupError):
                holder[key] = copy.deepcopy(other[its])
        elif what == 4 and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] = draw.choice([-1, 0, 2, 10**6, 1e30, 0.5]) * holder[key]
        elif what == 5:
            deep: Any = holder[key]
            for _ in range(draw.choice((5, 60, 500))):
                deep = [deep]
            holder[key] = deep
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return content


def _places(content: Any) -> Any:
    left = [content]
    while left:
        at = left.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        for key in keys:
            yield at, key
            left.append(at[key])


def scrambled(text: str, draw: random.Random) -> bytes:
    """A text with one to three changes of its lines, words or bytes."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        lines = text.split("\n")
        at = draw.randrange(len(lines))
        what = draw.randrange(7)
        if what == 0:
            del lines[at]
        elif what == 1:
            lines.insert(at, lines[at])
        elif what == 2:
            words = re.split(r"(\s+|[:,\[\]{}])", lines[at])
            words[draw.randrange(len(words))] = draw.choice(WORDS)
            lines[at] = "".join(words)
        elif what == 3:
            lines[at] = draw.choice([" ", "\t", "- ", "  "]) + lines[at]
        elif what == 4:
            lines[at] += draw.choice(WORDS)
        elif what == 5:
            lines = lines[:at]
        else:
            other = draw.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        text = "\n".join(lines)
    content = bytearray(text.encode(errors="replace"))
    if content and not draw.randrange(6):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def written(content: Any, kind: str, draw: random.Random) -> bytes:
    """A document as a file has it, mutated in its content or in its text."""
    if kind == "yaml":
        dump = lambda c: yaml.safe_dump(c, sort_keys=False, allow_unicode=True)  # noqa: E731
    else:
        dump = lambda c: json.dumps(c, indent=1)  # noqa: E731
    if draw.randrange(2):
        with contextlib.suppress(RecursionError, yaml.YAMLError, UnicodeError):
            return dump(mutated(content, draw)).encode()
    return scrambled(dump(content), draw)


def plain(content: Any) -> Any:
    """Tuples as lists, and whole floats apart from whole numbers and from yes and no."""
    if isinstance(content, dict):
        return {key: plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    return (type(content).__name__, content) if isinstance(content, bool) else content


def means(read: Any, raw: Any, where: str = "") -> None:
    """Raise Broken where what was read is not what the file says, key by key."""
    if isinstance(raw, dict) and isinstance(read, dict):
        for key in raw:
            if key not in read:
                raise Broken(f"{where}.{key} was taken, and is not there")
            means(read[key], raw[key], f"{where}.{key}")
    elif isinstance(raw, list) and isinstance(read, (list, tuple)) and len(read) == len(raw):
        for number, (one_read, one_raw) in enumerate(zip(read, raw, strict=True)):
            means(one_read, one_raw, f"{where}.{number}")
    elif plain(read) != plain(raw):
        raise Broken(f"{where} is {read!r}, the file says {raw!r}")


# ---------------------------------------------------------------- cases


def flags(draw: random.Random) -> None:
    """A command line of train: what is taken is the run's, and its own flags make it again."""
    words = ["train", "--strategy", draw.choice(["single", "ddp", "zero2", "zero3", "fsdp2"])]
    given = {}
    for option in draw.sample(config.OPTIONS, draw.choice((1, 2, 2, 3, 4))):
        if option.secondary_opts:
            words.append(draw.choice([option.opts[0], option.secondary_opts[0]]))
            continue
        value = _value(option, draw)
        words += [option.opts[0], value]
        given[option.name] = value
    if draw.randrange(2):
        words += ["--num-processes", _value(None, draw)]
    answer = ask(*words)
    if answer.started is None:
        if answer.status == 0:
            raise Broken("neither started nor refused")
        return
    run = answer.started
    if config.build_config(**config.parse_flags(run.arguments())) != run.config.model_copy(
        update={"output_dir": run.folder}
    ):
        raise Broken(f"{run.arguments()} make another run")
    for name, value in given.items():
        if name != "preset":
            _same(name, getattr(run.config, name), value)


def _value(option: click.Parameter | None, draw: random.Random) -> str:
    good = [] if option is None or not option.metavar else re.findall(r"[a-z0-9-]+", option.metavar)
    pool = [*good, *good, "1", "2", "8", "0.5", "16", "tiny", "mini"]
    return _word(draw.choice(pool if draw.randrange(2) else VALUES))


def _word(value: Any) -> str:
    """A value as a shell can hand it on."""
    return str(value).replace("\x00", "?").replace("\ud800", "\udcff")


def _same(name: str, value: Any, text: str) -> None:
    is_same = not isinstance(value, bool) and value is not None
    if is_same and isinstance(value, (int, float)):
        is_same = float(value) == float(text) and text.strip().isascii()
    elif is_same:
        is_same = str(value) == str(Path(text) if isinstance(value, Path) else text)
    if not is_same:
        raise Broken(f"{name} is {value!r}, asked was {text!r}")


COMMANDS = {
    "plan": ["smoke", "--only", "tiny-single"],
    "run": ["smoke", "--only", "tiny-single"],
    "compare": ["good"],
    "pack": ["good", "box.zip"],
    "merge": ["good.zip", "merged"],
    "advise": ["--gpu", "l4"],
    "predict": ["smoke", "--gpu", "l4"],
    "claims": [],
}


def commands(draw: random.Random) -> None:
    """Another command, with other words than it takes."""
    name = draw.choice(list(COMMANDS))
    words = [name, *COMMANDS[name]]
    known = [o for o in cli.all_commands()[name].params if isinstance(o, click.Option)]
    # It would decide all claims again, and write the verdicts.
    known = [option for option in known if option.name not in ("check", "write")]
    for option in draw.sample(known, min(len(known), draw.choice((0, 1, 2, 3)))):
        words.append(option.opts[0])
        if not option.is_flag:
            names = list(option.type.choices) if isinstance(option.type, click.Choice) else ["gpt2", "llama-2-7b", "8"]
            words.append(_word(draw.choice(names if draw.randrange(2) else VALUES)))
    if len(words) > 1 and draw.randrange(3) == 0:
        words[draw.randrange(1, len(words))] = _word(draw.choice(VALUES))
    if {"/dev", "/", "/dev/null"} & {*words}:
        return
    ask(*words)


def strategies(draw: random.Random) -> None:
    """An accelerate file or its JSON: what is taken is what the launcher will read."""
    path = draw.choice(sorted(file.CONFIGS.glob("*.yaml")))
    text, mine = path.read_text(), Path("mine.yaml")
    beside = path.with_suffix(".json")
    if beside.exists():
        Path("mine.json").write_bytes(beside.read_bytes())
        text = text.replace(f"accelerate_configs/{path.stem}.json", "mine.json")
    if beside.exists() and draw.randrange(2):
        Path("mine.json").write_bytes(written(json.loads(beside.read_text()), "json", draw))
        mine.write_text(text)
    elif draw.randrange(2):
        mine.write_bytes(scrambled(text, draw))
    else:
        mine.write_bytes(written(yaml.safe_load(text), "yaml", draw))
    read = refused(lambda: file.read_strategy(mine))
    if read is not None:
        means(read.content, yaml.safe_load(mine.read_text()))
        means(yaml.safe_load(mine.read_text()), read.content)
        if read.deepspeed_json is not None:
            listed = Path(read.content["deepspeed_config"]["deepspeed_config_file"])
            means(read.deepspeed_json, json.loads(listed.read_text()))
        launcher = read.content.get("deepspeed_config", {}).get("deepspeed_multinode_launcher")
        if read.distributed_type == "DEEPSPEED" and read.num_machines > 1 and launcher != "standard":
            raise Broken("DeepSpeed's own launcher was taken")
    if not draw.randrange(4):
        ask("train", "--strategy", mine, "--num-processes", draw.choice("123"))


def studies_(draw: random.Random) -> None:
    """A study: what is taken has the keys that were written, and its plan is quick."""
    path = draw.choice(sorted(studies.STUDIES.glob("*.yaml")))
    mine = Path("mine.yaml")
    text = path.read_text()
    mine.write_bytes(scrambled(text, draw) if draw.randrange(2) else written(yaml.safe_load(text), "yaml", draw))
    read = refused(lambda: studies.find("mine.yaml"))
    if read is not None:
        means(read.model_dump(), yaml.safe_load(mine.read_text()))
        runs = refused(lambda: studies.runs(read))
        if runs is not None and len(runs) > studies.MOST_RUNS:
            raise Broken(f"{len(runs)} runs")
    if not draw.randrange(4):
        ask("plan" if draw.randrange(3) else "run", "mine.yaml", "--only", "tiny")


def _broken_runs(draw: random.Random) -> None:
    """Run directories, or collected files, one file of which is mutated."""
    collected = bool(draw.randrange(2))
    shutil.copytree("collected-good" if collected else "good", "runs")
    path = draw.choice(sorted(path for path in Path("runs").rglob("*") if path.is_file()))
    if path.suffix == records.COMPRESSED and draw.randrange(2):
        path.write_bytes(scrambled(path.read_bytes().decode("latin-1"), draw))
        return
    if path.suffix == records.COMPRESSED:
        text = files.decompressed(path.read_bytes())
        path.unlink()
        path = path.with_suffix("")
        path.write_bytes(text)
    if path.suffix == ".jsonl":
        with contextlib.suppress(TypeError, RecursionError):  # of the case itself
            path.write_bytes(_broken_lines(path.read_text(), draw))
        if path.name == records.STEPS and draw.randrange(2):  # as if the run had written it
            _set_digest(path)
    elif not draw.randrange(12):
        path.unlink()
    else:
        path.write_bytes(written(json.loads(path.read_text()), "json", draw))


def _broken_lines(text: str, draw: random.Random) -> bytes:
    """Lines of JSON of which some are mutated, or the text is."""
    if not draw.randrange(2):
        return scrambled(text, draw)
    contents = mutated([json.loads(line) for line in text.splitlines()], draw)
    return "".join(json.dumps(line) + "\n" for line in contents).encode()


def _set_digest(steps: Path) -> None:
    path = steps.with_name("record.json")
    if path.exists():
        path.write_text(json.dumps({**json.loads(path.read_text()), "steps_sha256": files.sha256(steps)}))
        return
    path = steps.with_name(records.RECORDS)
    with contextlib.suppress(Refusal):  # where a line has no run's id
        held = records.read_lines(path)
        for run_id, line in records.read_lines(steps).items():
            if run_id in held:
                digest = hashlib.sha256(records.steps_in(run_id, line)).hexdigest()
                held[run_id] = records.line_of({**json.loads(held[run_id]), "steps_sha256": digest})
        path.write_bytes(records.join_lines(held))


def record_files(draw: random.Random) -> None:
    """Records, steps and outcomes: what is taken means what was written, and every table and copy can be made of it."""
    _broken_runs(draw)
    for run in refused(lambda: list(records.find_runs([Path("runs")]))) or ():
        held = {records.RECORDS: run.record and run.record.record, records.OUTCOMES: run.outcome}
        for name, content in run.contents.items():
            if content.get("strategy_file"):  # what it holds decides the name
                content = {**content, "strategy": shipped.name_of(content["strategy"], content["strategy_file"])}
            means(held[name].model_dump(), content)
    what = draw.randrange(6)
    if what == 0:
        ask("pack", "runs", "out")
    elif what == 1:
        if ask("pack", "runs", "box.zip").status == 0 and ask("merge", "box.zip", "out").status:
            raise Broken("packed, and not merged")
    elif what == 2:
        ask("plan", "mine-good.yaml", "--runs-dir", ".", "--only", "tiny")
    else:
        ask("compare", "runs", "--view", draw.choice(list(compare_command.VIEWS)))


def _uncompressed(path: Path) -> tuple[str, bytes]:
    content = path.read_bytes()
    packed = path.suffix == records.COMPRESSED
    return (path.stem, files.decompressed(content)) if packed else (path.name, content)


def packs(draw: random.Random) -> None:
    """A pack of other members, another manifest or other bytes: all of it arrives, or nothing."""
    whole = Path("good.zip").read_bytes()
    if draw.randrange(3) == 0:
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 5))):
            content[draw.randrange(len(content))] = draw.randrange(256)
        Path("box.zip").write_bytes(bytes(content[: draw.choice((len(content), len(content) // 2))]))
    else:
        with zipfile.ZipFile("good.zip") as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        name = draw.choice(list(members))
        if draw.randrange(3) and name.endswith(".json"):
            members[name] = written(json.loads(members[name]), "json", draw)
        elif draw.randrange(2) and name.endswith(".jsonl"):
            with contextlib.suppress(TypeError, RecursionError):  # of the case itself
                members[name] = _broken_lines(members[name].decode(), draw)
        elif draw.randrange(2):
            taken = members.pop(name)
            other = [*(f"{start}{name}" for start in ("../", "/tmp/", "a/", "a:")), "CON.json", "manifest.json"]
            members[draw.choice([*other, "é.json", "x.json"])] = taken
        else:
            members[name] = scrambled(members[name].decode(), draw)
        if draw.randrange(2):
            with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError, RecursionError):
                manifest = json.loads(members[pack.MANIFEST])
                digests = {n: hashlib.sha256(m).hexdigest() for n, m in members.items() if n != pack.MANIFEST}
                members[pack.MANIFEST] = json.dumps({**manifest, "sha256": digests}).encode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with zipfile.ZipFile("box.zip", "w", draw.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED))) as archive:
                for each, member in members.items():
                    archive.writestr(each, member)
    if ask("merge", "box.zip", "out").status == 0:
        with zipfile.ZipFile("box.zip") as archive:
            sent = {name: archive.read(name) for name in archive.namelist() if name != pack.MANIFEST}
        if sent != dict(map(_uncompressed, Path("out").iterdir())):
            raise Broken("merged other files than it holds")
        refused(lambda: list(records.find_runs([Path("out")])))


CONFIGS = [
    {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
    {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30522,
     "architectures": ["BertForSequenceClassification"]},
    {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
     "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
     "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "architectures": ["LlamaForCausalLM"]},
    {"model_type": "mistral"}, {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14},
    {"model_type": "gemma2"}, {"model_type": "gpt_neo"}, {"model_type": "gptj"},
]  # fmt: skip
SHAPE_KEYS = {
    "hidden_size": "hidden", "n_embd": "hidden", "num_hidden_layers": "layers", "n_layer": "layers",
    "num_attention_heads": "heads", "n_head": "heads", "vocab_size": "vocabulary",
}  # fmt: skip


def models(draw: random.Random) -> None:
    """A config.json for advise: the shape has the numbers of the file."""
    Path("config.json").write_bytes(written(draw.choice(CONFIGS), "json", draw))
    try:
        shape = shapes.find("config.json")
    except ValueError as error:
        if "\n" in str(error):
            raise Broken(f"several lines: {error}") from None
    else:
        raw = json.loads(Path("config.json").read_text())
        for key, part in SHAPE_KEYS.items():
            if key in raw and plain(raw[key]) != plain(getattr(shape, part)):
                raise Broken(f"{part} is {getattr(shape, part)!r}, the file says {key}: {raw[key]!r}")
    if not draw.randrange(3):
        answer = ask("advise", "--model", "config.json", "--gpu", "l4", "--gpus", draw.choice("128"), "--json")
        if answer.status == 0:
            json.loads(answer.out, parse_constant=lambda word: (_ for _ in ()).throw(Broken(f"{word} in the answer")))


def claims(draw: random.Random) -> None:
    """A ledger of claims, or its verdicts."""
    if not draw.randrange(4):
        path = Path("verdicts.json")
        content = json.loads(verdicts.VERDICTS.read_text())
        path.write_bytes(written(dict(draw.sample(sorted(content.items()), 3)), "json", draw))
        read = refused(lambda: verdicts.read(path))
        if read is not None:
            means({name: each.model_dump() for name, each in read.items()}, json.loads(path.read_text()))
        return
    source = draw.choice(sorted(path for path in ledger.FOLDER.glob("*.yaml") if path.stem != ledger.CITED))
    folder = Path("ledger")
    folder.mkdir()
    content = yaml.load(source.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    content["claims"] = [{**claim, "links": []} for claim in draw.sample(content["claims"], 2)]
    shutil.copy(f"{ledger.CITED}.yaml", folder)
    path = folder / source.name
    path.write_bytes(written(content, "yaml", draw))
    read = refused(lambda: ledger.read(folder))
    if read is not None:
        raw = yaml.safe_load(path.read_text())
        found = next(each for each in read if each.source == path.stem)
        means(found.model_dump(mode="json", exclude={"numbers"}), {k: v for k, v in raw.items() if k != "numbers"})


def odd_zips(draw: random.Random) -> None:
    """A zip file that no `pack` writes: nothing of it is written anywhere."""
    with zipfile.ZipFile("good.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(
        ["../x.json", "/tmp/x.json", "a/b.json", "folder/", "x.json", "x\x1b[31m\n.json", "records.jsonl.gz"]
    )
    result = {"benchmark": draw.choice(VALUES), "machine": draw.choice([*VALUES, {"environment": draw.choice(VALUES)}])}
    content = draw.choice([b"", b"../../etc/passwd", bytes(1 << 20), json.dumps(result).encode()])
    entry = zipfile.ZipInfo(name)
    kinds = [stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR, 0]
    entry.external_attr = (draw.choice(kinds) | 0o777) << 16
    entry.compress_type = draw.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    manifest = json.loads(members[pack.MANIFEST])
    manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
    if draw.randrange(4):
        members[pack.MANIFEST] = json.dumps(manifest).encode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile("box.zip", "w") as archive:
            for each, member in members.items():
                archive.writestr(each, member)
            for _ in range(draw.choice((1, 1, 2))):
                archive.writestr(entry, content)
    if draw.randrange(4) == 0:  # an entry that claims to be larger or smaller than it is
        packed = bytearray(Path("box.zip").read_bytes())
        place = packed.rfind(b"PK\x01\x02")
        packed[place + 24 : place + 28] = draw.choice((0, 1, 1 << 29, (1 << 32) - 2)).to_bytes(4, "little")
        Path("box.zip").write_bytes(packed)
    if ask("merge", "box.zip", "out").status == 0 and {path.name for path in Path("out").iterdir()} - {
        "x.json",
        *(name + records.COMPRESSED for name in records.NAMES),
    }:
        raise Broken(f"merged {sorted(Path('out').iterdir())}")


def matrices(draw: random.Random) -> None:
    """A file of `conformance --known`: it is compared, or refused in one line."""
    matrix = json.loads(min(results.ADAPTERS.glob("*.json")).read_text())
    wrong = {
        "verdict": "wrong", "share_of_bound": None, "of": "loss", "first_step": 1, "beyond": ["loss"],
        "norm_scale": [1.0, None], "update_scale": [None], "ranks_apart": {"step": 1, "of": ["w"]},
        "not_finite": ["loss"], "deviation": None, "wrong_states": ["bfloat16 for 3 elements"],
    }  # fmt: skip
    crashed = {
        "verdict": "crashed",
        "stage": "trained",
        "message": "RuntimeError: (a+)+ \x1b[31m at 0x7f /tmp/tmpabcdefgh/x",
    }
    names = draw.sample(sorted(matrix["cells"]), 4)
    matrix["cells"] = dict(
        zip(names, (wrong, crashed, {**crashed, "verdict": "refused"}, matrix["cells"][names[3]]), strict=True)
    )
    Path("known.json").write_bytes(written(matrix, "json", draw))
    with mock.patch.object(conformance_matrix, "run", return_value=matrix):
        ask("conformance", "--known", "known.json", "--output", "new.json")


def searches(draw: random.Random) -> None:
    """Words that no ledger has."""
    words = "".join(draw.choice([*WORDS, *map(str, VALUES), "zero3 ", '{"a": ', "}"]) for _ in range(draw.randrange(9)))
    ask("claims", *(["--search"] if draw.randrange(3) else []), _word(words))


CASES = [flags, commands, strategies, studies_, record_files, packs, models, claims, odd_zips, matrices, searches]


# ---------------------------------------------------------------- running them


def prepare(folder: Path) -> None:
    """What every case finds in its folder; and what takes seconds to import, which is no case's time."""
    for module in ("torch", "study.compare.differences"):
        importlib.import_module(module)
    good = folder / "good"
    for name, world_size in (("ddp", 2), ("zero2", 2), ("single", 1)):
        synthetic.write_run(good, strategy=name, world_size=world_size, study="s")
    synthetic.write_run(good, strategy="fsdp2", study="s", workload="bert-imdb")
    synthetic.write_run(good, strategy="zero2", seed=1, study="s", status="out_of_memory")
    synthetic.write_outcome(good, "killed", seed=2)
    with contextlib.redirect_stdout(io.StringIO()):
        pack.pack([good], folder / "good.zip")
        pack.merge(folder / "good.zip", folder / "collected-good")
    cited = yaml.safe_load((ledger.FOLDER / f"{ledger.CITED}.yaml").read_text())
    (folder / f"{ledger.CITED}.yaml").write_text(yaml.safe_dump({**cited, "claims": []}))
    (folder / "mine-good.yaml").write_text("question: Which?\nparts: [{flags: {workload: gpt-wikitext}}]\n")


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"it took more than {SECONDS} s")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """A folder for cases, beside one with what each of them finds."""
    folder = tmp_path_factory.mktemp("fuzz")
    prepare(folder / "template")
    with nothing_starts():
        yield folder


def hold(case: Callable[[random.Random], None], draw: random.Random, place: Path) -> None:
    """Run a case in a folder of its own. Raises what shows that it does not hold."""
    here = place / "case" / "here"
    shutil.rmtree(place / "case", ignore_errors=True)
    shutil.copytree(place / "template", here)
    file.read_by_name.cache_clear()
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with contextlib.chdir(here), contextlib.suppress(RunFailed):
            case(draw)
        if case in (record_files, packs, odd_zips) and list(here.parent.iterdir()) != [here]:
            raise Broken(f"written beside its folder: {list(here.parent.iterdir())}")
        if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 > MOST_MEMORY:
            raise Broken("it took more than 1 GiB of memory")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.mark.parametrize("case", CASES)
@given(draw=st.randoms())
def test_it_holds(case, draw, place):
    hold(case, draw, place)


def test_a_case_that_does_not_hold_is_seen(monkeypatch, place):
    """Were a file taken for another one it would be said."""
    monkeypatch.setattr(shapes, "find", lambda path: shapes.KNOWN["gpt2"])
    output = []
    for seed in range(20):
        try:
            hold(models, random.Random(seed), place)
        except Exception as error:  # a text that is no JSON is read here alone
            output.append(str(error))
    assert any("the file says" in each for each in output)


def test_a_refusal_that_changes_a_file_is_seen(monkeypatch, tmp_path):
    def collect(runs, folder):
        folder.mkdir()
        raise Refusal("no")

    (tmp_path / "alone").mkdir()  # the folder above is watched as well: not that of all tests
    monkeypatch.chdir(tmp_path / "alone")
    monkeypatch.setattr("study.records.pack.collect", collect)
    with pytest.raises(Broken, match="refused, and changed"):
        ask("pack", "runs", "out")
