"""Check, before anything is built, that all machines of a run are present and run the same code and options.

Without this check, a machine that refuses the run or has other versions or options would cause a timeout of minutes
inside the backend, or no error at all. At this point, torchrun's agents have already ensured that the requested number
of machines is present and that each has its own rank. The machines exchange their data in the store of the agent on
machine 0, which outlives the ranks.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from study.records import machine
from study.run import Run
from study.workloads import sources
from zero_study.errors import Refusal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_SECONDS = 0.1
DECLINE_SECONDS = 3
VERDICT_SECONDS = 10.0  # extra time for machine 0 to report its verdict after its own time limit


def join(run: Run) -> Store | None:
    """Wait for all machines, and return the store through which they exchange data. None if there is only one machine.

    Raises the same Refusal on every machine that is present. It names a machine that did not come within
    --collective-timeout, or a setting in which two machines differ. Collective: every rank must call this.
    """
    if run.num_machines == 1:
        return None
    seconds = run.config.collective_timeout
    store = _store(seconds)
    own = own_address(os.environ["MASTER_ADDR"])
    rank = int(os.environ["RANK"])
    facts = _facts(run) if run.is_first_of_machine(rank) else None
    try:
        if facts is not None:
            store.set(f"address/{run.machine_rank}", own)
            facts["shared run directory"] = _shares_folder(store, run)
            store.set(f"machine/{run.machine_rank}", json.dumps(facts))
        if rank == 0:
            store.set("verdict", _verdict(store, run, seconds))
        store.wait(["verdict"], datetime.timedelta(seconds=seconds + VERDICT_SECONDS))
        verdict = store.get("verdict").decode()
    except RuntimeError:
        late = (
            f"machine 0 was reached at {os.environ['MASTER_ADDR']}, but its rank 0 has ended, or did not "
            f"connect within {seconds} s (--collective-timeout). Look at the output of rank 0 on that machine."
        )
        with suppress(RuntimeError):  # in case machine 0 is only late
            store.set("refused", f"machine {run.machine_rank} has stopped waiting")
        raise Refusal(late) from None
    if verdict:
        raise Refusal(verdict)
    # On Debian, a machine's own host name resolves to its loopback address. If MASTER_ADDR is the host name of machine
    # 0, machine 0 must therefore use the route to another machine to find its own address.
    use_interface_of(own if run.machine_rank else own_address(store.get("address/1").decode()))
    return store


def refuse_to_join(run: Run, refusal: Refusal) -> None:
    """Report to the other machines that this machine refuses the run, and why.

    A machine that has not reached the rendezvous yet finds its own reason for refusing.
    """
    if run.num_machines == 1:
        return
    with suppress(Refusal, RuntimeError):  # machine 0 has ended and has printed its own reason
        store = _store(DECLINE_SECONDS)
        store.set("refused", f"machine {run.machine_rank}: {refusal}")
        if os.environ.get("RANK", "0") == "0":
            store.set("verdict", f"machine 0: {refusal}")
            time.sleep(DECLINE_SECONDS)  # when this rank ends, its agent ends too, and with it the store


def _store(seconds: int) -> Store:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        shared = TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=seconds))
    except RuntimeError as error:
        raise Refusal(
            f"machine 0 cannot be reached at {address}:{port} ({' '.join(str(error).split())[:120]}). "
            "Change --main_process_ip, or open its ports"
        ) from None
    return PrefixStore("zero-study", shared)


def own_address(peer: str) -> str:
    """Return the address from which this machine reaches `peer`. Empty if there is no route, or if `peer` is empty."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if peer:  # an empty address would mean this machine
            probe.connect((peer, 9))  # chooses the route without sending anything
            return str(probe.getsockname()[0])
    return ""


def use_interface_of(address: str) -> None:
    """Make gloo use the network interface that has this address. By default, gloo uses the one of the host name.

    On Debian, the default is the loopback interface, which other machines cannot reach. A GLOO_SOCKET_IFNAME that the
    user has set is kept.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _facts(run: Run) -> dict[str, Any]:
    """Return the settings that must be the same on all machines."""
    return {
        **run.config.model_dump(mode="json", exclude={"output_dir", "data_dir", "swap_dir", "weights"}),
        "strategy's file": {key: run.strategy.written[key] for key in ("yaml", "json")},
        "num_processes": run.world_size,
        "num_machines": run.num_machines,
        "Python": ".".join(map(str, sys.version_info[:2])),
        **machine.versions(),
        **machine.git_state(),
        "code of sha256": machine.code_sha256()[:12],
        "device": machine.devices(),
        "initial weights": None if run.config.weights is None else sources.weights_sha256(run.config.weights),
    }


def _shares_folder(store: Store, run: Run) -> bool:
    """Return whether this machine sees the files that machine 0 writes to the run directory.

    True without a check if the run writes neither checkpoints nor a model, because only these need a shared folder.
    """
    if not (run.config.checkpoint_every or run.config.save_model):
        return True
    if run.machine_rank == 0:
        run.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=run.folder, prefix=".machine0-", delete=False) as token:
            store.set("token", Path(token.name).name)
        return True
    store.wait(["token"], datetime.timedelta(seconds=run.config.collective_timeout))
    return (run.folder / store.get("token").decode()).exists()


def _verdict(store: Store, run: Run, seconds: int) -> str:
    """Wait for the settings of all machines and compare them with those of machine 0.

    Return the reason to refuse the run.

    Empty if all machines have the same settings.
    """
    keys = {rank: f"machine/{rank}" for rank in range(run.num_machines)}
    deadline = time.monotonic() + seconds
    while missing := [rank for rank, key in keys.items() if not store.check([key])]:
        if store.check(["refused"]):
            return store.get("refused").decode()
        if time.monotonic() > deadline:
            words = f"machine{'s' if missing[1:] else ''} {', '.join(map(str, missing))}"
            return (
                f"{words} of {run.num_machines} did not connect within {seconds} s "
                "(--collective-timeout). Start the same command there with its own --machine_rank, and "
                "check that it reaches --main_process_ip"
            )
        time.sleep(POLL_SECONDS)
    for token in run.folder.glob(".machine0-*"):
        token.unlink()
    facts = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
    for rank, theirs in facts.items():
        for name, ours in facts[0].items():
            if theirs.get(name) != ours:
                return _differing(rank, name, ours, theirs.get(name))
    return ""


def _differing(rank: int, name: str, ours: Any, theirs: Any) -> str:
    if name == "shared run directory":
        return (
            f"machine {rank} does not see the run directory of machine 0, but checkpoints need a run "
            "directory that all machines share. Use an --output-dir on a shared disk, or train without "
            "--checkpoint-every."
        )
    if isinstance(ours, dict):
        return f"machine {rank} has a different {name} from machine 0. Copy the file of machine 0 to machine {rank}."
    return f"machine {rank} has {name} {theirs}, but machine 0 has {ours}. Use the same value on both machines."
