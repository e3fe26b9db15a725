"""Simulate several machines on one machine: network namespaces on a network with a chosen rate (Linux, as root).

    python tools/measure/laboratory.py --machines 3 --rate 200mbit \\
        'echo $MACHINE_RANK of $NUM_MACHINES, $MAIN_PROCESS_IP'

Each simulated machine is a network namespace with one interface, eth0, and a view of the disk in which some folders are
its own. All are connected by a bridge in a namespace of its own, so nothing is visible outside or leaves the real
machine. Processors and memory are shared.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import psutil

from study.records.laboratory import LABORATORY, UNLIMITED, bits_per_second
from zero_study.errors import Refusal

PREFIX = "zero-study"
MOST_MACHINES = 64
# A bucket of tokens is filled with every tick of the kernel's clock, of which there are 100 a second at the least.
TICK_SECONDS = 0.01
SMALLEST_BURST_BYTES = 64 << 10
# As much may wait to be sent as TCP keeps on its way at all: what the network drops would be sent twice.
QUEUE_BYTES = 32 << 20


class Lab:
    """Simulated machines on one network, in a `with` block. The next laboratory removes those of a killed process."""

    def __init__(self, num_machines: int, rate: str = UNLIMITED, own_folders: Sequence[Path] = ()) -> None:
        """Make the machines, joined by a network.

        `rate` is the rate of each machine's interface in each direction, as tc writes it ("200mbit"), or unlimited.
        Every machine except the first has its own `own_folders`, which are empty at first. Raises Refusal if the
        machines cannot be made, or if the rate is invalid.
        """
        if not 1 <= num_machines <= MOST_MACHINES:
            raise Refusal(f"{num_machines} machines: a laboratory has 1 to {MOST_MACHINES}; pass --machines 2")
        if bits_per_second(rate) is None:
            raise Refusal(f"rate {rate!r}: write a number and kbit, mbit or gbit, as 200mbit, or {UNLIMITED}")
        self.num_machines, self.rate = num_machines, rate
        self._own_folders = [folder.absolute() for folder in own_folders]
        self._name = f"{PREFIX}-{os.getpid()}-{time.monotonic_ns() % 10**6}"
        self._disks: Path | None = None

    @property
    def main_ip(self) -> str:
        """Return the address of machine 0."""
        return self._address(0)

    def _address(self, machine: int) -> str:
        return f"10.77.0.{machine + 1}"

    def _namespace(self, machine: int | str) -> str:
        return f"{self._name}-{machine}"

    def __enter__(self) -> Lab:
        check()
        remove_left_over()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for machine in [*range(self.num_machines), "bridge"]:
            _remove(self._namespace(machine))
        if self._disks is not None:
            shutil.rmtree(self._disks, ignore_errors=True)

    def _make(self) -> None:
        self._disks = Path(tempfile.gettempdir()) / self._name
        self._disks.mkdir()
        bridge = self._namespace("bridge")
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for machine in range(self.num_machines):
            namespace, port = self._namespace(machine), f"port{machine}"
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", bridge)
            _ip("-n", namespace, "address", "add", f"{self._address(machine)}/24", "dev", "eth0")
            _ip("-n", bridge, "link", "set", port, "master", "bridge")
            for place, interface in ((namespace, "lo"), (namespace, "eth0"), (bridge, port)):
                _ip("-n", place, "link", "set", interface, "up")
            if self.rate != UNLIMITED:  # what a machine sends, and what it receives from several at once
                _limit(namespace, "eth0", self.rate)
                _limit(bridge, port, self.rate)

    def command(self, machine: int, words: Sequence[str]) -> list[str]:
        """Return the command that starts a program on a simulated machine."""
        steps = ["mount --make-rprivate /"]  # of a view of the disk that `ip netns exec` makes for each command
        for index, folder in enumerate(self._own_folders if machine else []):
            assert self._disks is not None
            disk = self._disks / f"machine{machine}-{index}"
            disk.mkdir(exist_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            steps.append(f"mount --bind {shlex.quote(str(disk))} {shlex.quote(str(folder))}")
        steps.append(f"export {LABORATORY}={self.rate}")
        change_folder = f"cd {shlex.quote(os.getcwd())}"  # once more, for it may lie under what was just mounted
        script = " && ".join([*steps, change_folder, f"exec {shlex.join(words)}"])
        return [shutil.which("ip") or "ip", "netns", "exec", self._namespace(machine), "sh", "-c", script]

    def start(self, machine: int, words: Sequence[str], **options: Any) -> subprocess.Popen:
        """Start a program on a machine, with the `options` of `subprocess.Popen`."""
        return subprocess.Popen(self.command(machine, words), **options)

    def variables(self, machine: int) -> dict[str, str]:
        """Return the variables that a command needs to take part in a launch on all machines."""
        return {"NUM_MACHINES": str(self.num_machines), "MACHINE_RANK": str(machine), "MAIN_PROCESS_IP": self.main_ip}

    def cut(self, machine: int) -> None:
        """Drop all packets from and to a machine without notice, like a firewall or an unplugged cable."""
        _ip("-n", self._namespace("bridge"), "link", "set", "dev", f"port{machine}", "nomaster")

    def kill(self, machine: int) -> None:
        """Kill all processes of a machine. Its kernel keeps running and closes the connections."""
        _kill(self._namespace(machine))


def check() -> None:
    """Refuse if no laboratory can be made on this machine."""
    if os.geteuid() != 0:
        raise Refusal("a laboratory of several machines makes network namespaces, which takes root; use sudo")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise Refusal(f"a laboratory of several machines needs {program}; run: apt-get install iproute2")


def remove_left_over() -> None:
    """Remove the simulated machines of laboratories whose process has ended."""
    for entry in json.loads(_ip("-j", "netns", "list") or "[]"):
        if _is_left_over(entry["name"]):
            _remove(entry["name"])
    for disks in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        if _is_left_over(disks.name):
            shutil.rmtree(disks, ignore_errors=True)


def _is_left_over(name: str) -> bool:
    """Return whether the name is that of a laboratory, or a part of one, whose process has ended."""
    match = re.fullmatch(rf"{PREFIX}-(\d+)-\d+(-\w+)?", name)
    return match is not None and not psutil.pid_exists(int(match[1]))


def _remove(namespace: str) -> None:
    with suppress(Refusal):  # it was never made
        _kill(namespace)
        _ip("netns", "delete", namespace)


def _kill(namespace: str) -> None:
    for number in _ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


def _limit(namespace: str, interface: str, rate: str) -> None:
    bits = bits_per_second(rate)
    assert bits is not None
    burst = max(SMALLEST_BURST_BYTES, int(bits / 8 * TICK_SECONDS))
    limits = ["rate", rate, "burst", str(burst), "limit", str(QUEUE_BYTES)]
    _run(["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limits])


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _run(words: list[str]) -> str:
    """Return the output of a command. Raises Refusal with the command's own message if it fails."""
    process = subprocess.run(words, capture_output=True, text=True)
    if process.returncode:
        raise Refusal(f"{' '.join(words)}: {' '.join(process.stderr.split()) or f'exit status {process.returncode}'}")
    return process.stdout


def run_everywhere(lab: Lab, line: str, say: Callable[[str], None]) -> list[int]:
    """Run a shell command on every machine at once and return the exit statuses. `say` gets each line of output.

    The command can use $MACHINE_RANK, $NUM_MACHINES and $MAIN_PROCESS_IP, which a launcher needs.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}

    def follow(machine: int) -> int:
        there = {**os.environ, **lab.variables(machine)}
        words = ["sh", "-c", line]
        with lab.start(machine, words, env=there, text=True, errors="replace", **pipes) as process:
            for line_read in process.stdout or ():
                say(f"machine {machine}: " + line_read.rstrip("\n").rpartition("\r")[2])
        return process.returncode

    with ThreadPoolExecutor(lab.num_machines) as pool:
        return list(pool.map(follow, range(lab.num_machines)))


@click.command()
@click.argument("line", metavar="COMMAND")
@click.option("--machines", default=2)
@click.option("--rate", default=UNLIMITED, help="of each interface, each way, as 200mbit")
@click.option("--own", type=click.Path(path_type=Path), multiple=True, default=["runs"])
def main(line: str, machines: int, rate: str, own: Sequence[Path]) -> None:
    """Run one shell command on several simulated machines. The exit status is 0 if it is 0 on all of them."""
    try:
        with Lab(machines, rate, own) as lab:
            statuses = run_everywhere(lab, line, click.echo)  # a line in one write; print's newline would come apart
    except Refusal as refusal:
        sys.exit(f"tools/measure/laboratory.py: {refusal}")
    for machine, status in enumerate(statuses):
        if status:
            print(f"machine {machine} ended with status {status}")
    sys.exit(int(any(statuses)))


if __name__ == "__main__":
    main()
