"""A server in a process of its own, from its start to an end that leaves nothing behind.

The server and its engine form a process group. A signal to stop is passed on to the server alone, which then ends its engine; what is
left of the group after `GRACE_S` is killed. Should this process be killed outright, the kernel kills the server, and the samebits
plugin ends the engine with it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence

GRACE_S = 2.5
"""Seconds from the signal to stop until what still runs is killed."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is here, whatever proxy there is
_PR_SET_PDEATHSIG = 1
_ERROR = re.compile(r"\b((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Refused|Changed|Mismatch)): (.+)")
_BLAND = re.compile(r"Engine core initialization failed|EngineCore encountered an issue")


class ServerFailed(RuntimeError):
    """The server ended by itself. The message is one line."""


def port_problem(host: str, port: int) -> str | None:
    """Why a server cannot listen there, or None."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, OverflowError) as error:
        return f"{host}:{port} is no address ({error})"
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return f"port {port} of {host}: {error.strerror}"
    return None


def run(command: Sequence[str], environment: Mapping[str, str], url: str, ready: Callable[[], None], verbose: bool) -> None:
    """Run a server until it is told to stop by SIGINT or SIGTERM.

    `environment`: what is added to this process's own. `url`: answers 200 as soon as the server is ready; `ready` is called then.
    `verbose`: let the server's output through. Raises `ServerFailed` when the server ends without being told to.
    """
    stopped: list[float] = []
    lines: collections.deque[str] = collections.deque(maxlen=2000)
    output = None if verbose else subprocess.PIPE
    previous = {s: signal.signal(s, lambda *_: stopped.append(time.monotonic())) for s in (signal.SIGINT, signal.SIGTERM)}
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    reader = None
    if output:
        reader = threading.Thread(target=_keep, args=(process.stdout, lines), daemon=True)
        reader.start()
    try:
        announced, told = False, False
        while process.poll() is None:
            if stopped and not told:
                process.terminate()
                told = True
            if stopped and time.monotonic() - stopped[0] > GRACE_S:
                break
            if not announced and not stopped and _answers(url):
                announced = True
                ready()
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if not stopped:
        if reader is not None:
            reader.join(timeout=5)
        raise ServerFailed(f"the server ended with status {process.returncode}: {'see above' if verbose else _cause(list(lines))}")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep(pipe, lines: collections.deque[str]) -> None:
    for line in pipe:
        lines.append(line.decode(errors="replace").rstrip())


def _answers(url: str) -> bool:
    try:
        with _OPENER.open(url, timeout=1) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def _cause(lines: Sequence[str]) -> str:
    """The first error that a process printed and that says something; --verbose shows all."""
    for line in lines:
        found = _ERROR.search(line)
        if found and not _BLAND.search(line):
            return f"{found[1]}: {found[2][:400]}"
    return next((line for line in reversed(lines) if line.strip()), "it printed nothing") + " (--verbose shows all)"
