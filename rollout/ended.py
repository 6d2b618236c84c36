"""How a process ended, and the notes in which a server tells the job's driver that its engine did.

Only a parent learns the status of a process, and only once; processes of a job are children of Ray. A pidfd keeps what newer kernels
(from Linux 6.15) still tell after the process is gone. Where it is not told, nothing is guessed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list, _internal_kv_put

# ioctl PIDFD_GET_INFO with the first version of struct pidfd_info, its bytes, where the status lies in it, and PIDFD_INFO_EXIT.
_GET_INFO, _SIZE, _STATUS_AT, _EXIT = 0xC040FF0B, 64, 60, 1 << 3


def hold(pid: int) -> int | None:
    """A pidfd of a process, to be closed by the caller; None when it is gone or this system has none."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def status(handle: int | None) -> int | None:
    """Status, as wait(2) gives it, of a process that has ended; None where the kernel does not tell."""
    if handle is None:
        return None
    answer = bytearray(struct.pack("Q", _EXIT) + bytes(_SIZE - 8))
    try:
        fcntl.ioctl(handle, _GET_INFO, answer)
    except OSError:  # a kernel that does not know the question
        return None
    told = struct.unpack_from("Q", answer)[0] & _EXIT
    return struct.unpack_from("i", answer, _STATUS_AT)[0] if told else None


def from_exitcode(exitcode: int | None) -> int | None:
    """Status, as wait(2) gives it, of what Python calls an exit code: -9 is signal 9."""
    if exitcode is None:
        return None
    return -exitcode if exitcode < 0 else exitcode << 8


def words(code: int | None) -> str:
    """`was ended by signal 9 (SIGKILL)`, `ended with exit code 3`; `code` as wait(2) gives it, or None where it is not known."""
    if code is None:
        return "ended"
    if not os.WIFSIGNALED(code):
        return f"ended with exit code {os.waitstatus_to_exitcode(code)}"
    number = os.WTERMSIG(code)
    with contextlib.suppress(ValueError):
        return f"was ended by signal {number} ({signal.Signals(number).name})"
    return f"was ended by signal {number}"


def leave_note(job: str, replica: int, text: str) -> None:
    """Write one line on a replica's engine into the cluster's store, where the driver of `job` looks."""
    _internal_kv_put(_prefix(job) + str(replica).encode(), text.encode())


def notes(job: str) -> list[str]:
    """The notes of a job, by replica."""
    return [_internal_kv_get(key).decode() for key in sorted(_internal_kv_list(_prefix(job)))]


def _prefix(job: str) -> bytes:
    return f"samebits:ended:{job}:".encode()
