"""Locks between threads and between processes, of which a forked child keeps none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path

_held: set[int] = set()  # descriptors of file locks


def open_lock() -> threading.Lock:
    """A lock for threads, which a forked child finds open, whoever held it in its parent."""
    made = threading.Lock()
    os.register_at_fork(after_in_child=made._at_fork_reinit)  # type: ignore[attr-defined]
    return made


def acquire(path: Path) -> int:
    """A descriptor that holds a file's lock until it is released, or its process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _held.add(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(path)):
                    return lock
        except BaseException:
            release(lock)
            raise
        release(lock)  # the file was removed between open and flock


def release(lock: int) -> None:
    """Give a file's lock back, whoever else may have its descriptor."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    _held.discard(lock)
    os.close(lock)


def _leave() -> None:
    """A child closes its parent's descriptors: left open, they would hold the locks as long as it
    lives.
    """
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_leave)
