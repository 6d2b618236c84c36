"""Machines in a network, made of Linux namespaces of this one: what several nodes do not share, two processes here do not share either.

Each has a host name, a network address, a /dev/shm and a folder for temporary files of its own, and can write nowhere else but into one
folder that all see, the shared file system. Processes and cores are common: nothing here says how fast anything is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.77.0"
_READY = "ready"
# The file system is read-only but for three places. `local` is hidden from the other machines by lying under a mount of each one's own.
_MACHINE = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {local}
mount -t tmpfs tmpfs /dev/shm
mount --bind {shared} {shared}
printf '%s' '{hosts}' > {local}/hosts
mount --bind {local}/hosts /etc/hosts
mount -o remount,bind,ro /
hostname {name}
ip link set lo up
echo {ready}
exec cat
"""


def absent() -> str | None:
    """Why machines cannot be made here, in one line; None where they can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool, path=_path()) is None]
    if missing:
        return f"{missing[0]} is not installed"
    tried = subprocess.run([*_unshare(user=True), "true"], capture_output=True, text=True, env=os.environ | {"PATH": _path()})
    return None if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip()}"


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine."""

    name: str
    address: str
    local: Path
    """Its folder for temporary files: the same path on each machine, another folder."""
    shared: Path
    holder: int
    """Process that keeps its namespaces."""

    def inside(self, command: Sequence[str], **environment: str) -> list[str]:
        """`command` as one of this machine's."""
        own = {"TMPDIR": str(self.local), "HOME": str(self.local), "PATH": _path()} | environment
        return [*_enter(self.holder), "env", *(f"{k}={v}" for k, v in own.items()), *command]


@contextmanager
def machines(count: int, folder: Path) -> Iterator[list[Machine]]:
    """`count` machines in one network. `folder` must have a short path: Ray puts sockets below, whose paths may have 107 bytes."""
    local, shared = folder / "local", folder / "shared"
    local.mkdir()
    shared.mkdir()
    names = [f"node{i + 1}" for i in range(count)]
    addresses = [f"{NETWORK}.{i + 1}" for i in range(count)]
    hosts = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(addresses, names, strict=True))
    with ExitStack() as held:
        # The network they share belongs to the namespaces that they are made in: a bridge, and a cable to each.
        bridge = "ip link add name bridge type bridge && ip link set bridge up"
        switch = _held(held, [*_unshare(user=True), "sh", "-c", f"{bridge} && echo {_READY} && exec cat"])
        found = []
        for name, address in zip(names, addresses, strict=True):
            script = _MACHINE.format(local=local, shared=shared, hosts=hosts, name=name, ready=_READY)
            holder = _held(held, [*_enter(switch), *_unshare(user=False), "sh", "-c", script])
            cable = f"ip link add name {name} type veth peer name eth0 netns {holder} && ip link set {name} master bridge up"
            _run([*_enter(switch), "sh", "-c", cable])
            _run([*_enter(holder), "sh", "-c", f"ip addr add {address}/24 dev eth0 && ip link set eth0 up"])
            found.append(Machine(name, address, local, shared, holder))
        yield found


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _unshare(user: bool) -> list[str]:
    return ["unshare", *(["--user", "--map-root-user"] if user else []), "--mount", "--net", "--uts", "--ipc"]


def _enter(process: int) -> list[str]:
    return ["nsenter", "--target", str(process), "--user", "--mount", "--net", "--uts", "--ipc", "--preserve-credentials"]


def _held(stack: ExitStack, command: list[str]) -> int:
    """A process that keeps namespaces until the stack is left; its id, once it is ready."""
    # It reads from a pipe of ours, so that it ends with us, however that happens.
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=os.environ | {"PATH": _path()}, **pipes)
    stack.callback(process.communicate)
    if process.stdout.readline().strip() != _READY:
        process.kill()
        raise RuntimeError(process.communicate()[1].strip())
    return process.pid


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"PATH": _path()})
