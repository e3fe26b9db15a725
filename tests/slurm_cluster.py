"""A Slurm of two nodes on this machine, for tests, in one folder: needs root, and `make slurm`; ends what it starts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
SBIN = "/usr/sbin"  # not on everybody's path
READY_SECONDS = 30
MEMORY_GROUP = Path("/sys/fs/cgroup/memory")  # of control groups of version 1, which Slurm 22 manages without systemd

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugins}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=3500
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=8000
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=8000
PartitionName=main Nodes=ALL Default=YES MaxTime=60
"""


@dataclass(frozen=True)
class Cluster:
    folder: Path
    nodes: tuple[str, str]
    limits_memory: bool  # by control groups; False: a job may take what it likes

    def ask(self, *words: str) -> str:
        """Run a program of Slurm's."""
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, check=True).stdout

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def idle_nodes(self) -> int:
        return self.ask("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t").split().count("idle")

    def is_clear(self) -> bool:
        return not self.ask("squeue", "--noheader").strip() and self.idle_nodes() == 2


def lacking() -> str | None:
    """Say why there can be no cluster here; None: there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}") is None]
    if missing:
        return f"{missing[0]} is not installed; run: make slurm"
    return None if os.getuid() == 0 else "slurmd needs root"


@contextmanager
def started() -> Iterator[Cluster]:
    """Start a cluster, and end it."""
    folder = Path(tempfile.mkdtemp(prefix="zs-"))  # short, for a socket's path has at most 107 characters
    cluster = Cluster(folder, (f"zs{os.getpid()}a", f"zs{os.getpid()}b"), os.access(MEMORY_GROUP, os.W_OK))
    _write(cluster)
    processes: list[subprocess.Popen] = []

    def start(program: str, *words: str) -> None:
        with open(folder / f"{program}{len(processes)}.out", "w") as output:
            command = [f"{SBIN}/{program}", *words]
            processes.append(subprocess.Popen(command, env=cluster.environment, stdout=output, stderr=output))

    try:
        places = {"key-file": "key", "socket": "munge.sock", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        start("munged", "--foreground", "--force", *(f"--{name}={folder / place}" for name, place in places.items()))
        _wait(lambda: (folder / "munge.sock").exists(), folder)
        start("slurmctld", "-D", "-c")
        for node in cluster.nodes:
            start("slurmd", "-D", "-N", node)
        _wait(lambda: cluster.idle_nodes() == 2, folder)
        yield cluster
        cluster.ask("scancel", "--user=root")
        _wait(lambda: not cluster.ask("squeue", "--noheader").strip(), folder)
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
        for group in Path("/sys/fs/cgroup").glob(f"*/slurm_zs{os.getpid()}?"):  # slurmd leaves them
            for inner in sorted((each for each in group.rglob("*") if each.is_dir()), reverse=True):
                inner.rmdir()
            group.rmdir()
        shutil.rmtree(folder)


def _write(cluster: Cluster) -> None:
    folder = cluster.folder
    folder.chmod(0o755)  # munge's socket is for everybody
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    sockets = [socket.socket() for _ in range(3)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    text = CONFIGURATION.format(
        folder=folder,
        host=socket.gethostname(),
        nodes=cluster.nodes,
        ports=[each.getsockname()[1] for each in sockets],
        task_plugins="task/affinity,task/cgroup" if cluster.limits_memory else "task/affinity",
    )
    for each in sockets:
        each.close()
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\nConstrainSwapSpace=no\n")


def _wait(is_so, folder: Path) -> None:
    """Wait until something is so; fail with what the daemons said where it never is."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with suppress(subprocess.CalledProcessError):  # no controller yet
            if is_so():
                return
        time.sleep(0.2)
    said = "\n".join(f"{path.name}: {path.read_text()[-1000:]}" for path in folder.glob("*.out"))
    raise AssertionError(f"the cluster is not there after {READY_SECONDS} s\n{said}")
