"""The cache of built modules: look up, lock, build, publish; what is damaged is set aside.

The root is `FUSEGEN_CACHE_DIR`, else `$XDG_CACHE_HOME/fusegen`, else `~/.cache/fusegen`; in it:

    <chain hash>/<build key>/   sources, module.so and manifest.json of one finished build
    building/                   attempts in progress, one directory each
    locks/                      one lock file a build key
    quarantine/                 the last few entries that failed their checksum or did not load
    failed/                     the last few attempts that failed, with source and compiler.log
    facts/                      small remembered answers, such as a compiler's version
    shared/                     files that many builds are made with, their digests in their names

Why: an attempt has a directory of its own and is published by one rename, so a reader sees a whole
entry or none, and a killed builder leaves nothing that a later one could trip over. The lock is an
flock, which the kernel drops when its holder dies; a lock *file*, such as torch's, outlives its
process and then hangs everybody. Correctness rests on the rename alone, the lock only saves work.
"""

import contextlib
import datetime
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from fusegen import __version__, locking
from fusegen.errors import BuildError, CacheError

MODULE_NAME = "module.so"
MANIFEST_NAME = "manifest.json"
SET_ASIDE_LIMIT = 8  # directories kept in quarantine/, and as many in failed/
_BUILDING = "building-"  # how the names begin of files in shared/ that are being made
CHAIN_HASH_DIGITS = 16  # of the chain hash's 64, in the name of its directory
SWITCH_WORDS = {"1": True, "true": True, "yes": True, "on": True} | dict.fromkeys(
    ("", "0", "false", "no", "off"), False
)

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Environment:
    """What fusegen's own environment variables say; nothing else in the package reads them."""

    cache_dir: Path  # FUSEGEN_CACHE_DIR
    no_build: bool  # FUSEGEN_NO_BUILD


@dataclass(frozen=True)
class Entry:
    """One build that is wanted: whose it is, and the key that says what it depends on."""

    chain_text: str
    chain_hash: str
    target: str
    key: str
    fingerprint: Mapping[str, str]

    def directory(self, root: Path) -> Path:
        """The place of the finished build under a cache root."""
        return root / self.chain_hash[:CHAIN_HASH_DIGITS] / self.key


@dataclass(frozen=True)
class Manifest:
    """What is recorded beside a module; `sha256` and `size_bytes` are the module file's."""

    chain_text: str
    chain_hash: str
    target: str
    key: str
    fingerprint: Mapping[str, str]
    fusegen_version: str
    sha256: str
    size_bytes: int
    build_seconds: float
    date: str  # of the build; ISO 8601, UTC


@dataclass(frozen=True)
class Published:
    """One finished build in the cache."""

    directory: Path
    manifest: Manifest


def environment() -> Environment:
    """The environment's settings, read afresh."""
    switch = os.environ.get("FUSEGEN_NO_BUILD", "")
    if switch.lower() not in SWITCH_WORDS:
        words = ", ".join(word for word in SWITCH_WORDS if word)
        raise CacheError(f"FUSEGEN_NO_BUILD is {switch!r}; set it to one of {words}")
    named, xdg = os.environ.get("FUSEGEN_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    cache_dir = named or os.path.join(xdg if os.path.isabs(xdg) else "~/.cache", "fusegen")
    cache_dir = os.path.expanduser(cache_dir)
    if cache_dir.startswith("~"):
        raise CacheError(f"no home directory for {cache_dir}; set FUSEGEN_CACHE_DIR")
    if found := re.search(r"[:$|\n\r]", cache_dir):
        raise CacheError(
            f"the cache's path {cache_dir!r} has a {found[0]!r}, with which ninja cannot build; "
            "name another directory in FUSEGEN_CACHE_DIR"
        )
    return Environment(Path(os.path.abspath(cache_dir)), SWITCH_WORDS[switch.lower()])


def cache_root() -> Path:
    """The cache's root directory, whether it exists or not."""
    return environment().cache_dir


def build_key(*parts: str) -> str:
    """A digest of the parts, 32 hex digits; ("ab", "c") and ("a", "bc") give different ones."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(b"%d:" % len(encoded) + encoded)
    return digest.hexdigest()[:32]


def load_or_build(
    entry: Entry, build: Callable[[Path], Path], load: Callable[[Path], Loaded]
) -> Loaded:
    """The entry's module, from the cache or built now; processes that race build it once.

    `build(directory)` gets a fresh directory, leaves in it what is worth keeping and returns the
    module's path, or raises BuildError; where its message names the directory, the message that
    reaches the user names the place where the attempt is kept. `load(path)` turns a module's file
    into the module; ImportError, OSError or SystemError from it mean that the file is no good.

    Raises BuildError for a failed build and CacheError for a miss under FUSEGEN_NO_BUILD. Where
    the cache cannot be written, a miss warns and builds in a directory of this process.
    """
    settings = environment()
    root = settings.cache_dir
    found = _look_up(root, entry, load)
    if found is not None:
        return found
    if settings.no_build:
        raise CacheError(
            f"FUSEGEN_NO_BUILD is set and there is no usable build of {entry.chain_text!r} "
            f"({entry.target}, key {entry.key}) in {root}; run once without it, with the same "
            "FUSEGEN_CACHE_DIR, torch and compiler"
        )
    try:
        lock = locking.acquire(root / "locks" / entry.key)
    except OSError as error:
        root = Path(_private_directory().name)
        lock = locking.acquire(root / "locks" / entry.key)
        warnings.warn(
            f"fusegen cannot write its cache {settings.cache_dir} ({error.strerror}) and builds in "
            f"{root}, for this process only; name a writable directory in FUSEGEN_CACHE_DIR",
            stacklevel=2,
        )
    try:
        found = _look_up(root, entry, load)
        return found if found is not None else _build(root, entry, build, load)
    except OSError as error:
        raise CacheError(
            f"the cache {root} cannot be used to build {entry.chain_text!r}: {error}; make room "
            "and permit writing there, or name another directory in FUSEGEN_CACHE_DIR"
        ) from error
    finally:
        locking.release(lock)


def remember(
    question: str, answer: Callable[[], str], *, is_sure: Callable[[], bool] = lambda: True
) -> str:
    """The answer to a question, kept on disk; the question must name all that it depends on.

    A digest of both stands before it, so that an answer that is damaged, or another question's, is
    found again. One that is not sure, which is asked once it is known, is not kept.
    """
    path = cache_root() / "facts" / build_key(question)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        digest, _, known = path.read_text().partition("\n")
        if digest == build_key(question, known):
            return known
    known = answer()
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        if is_sure():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, f"{build_key(question, known)}\n{known}")
    return known


def kept(name: str) -> Path | None:
    """The file of that name which `keep` has kept, whole; None where there is none."""
    with contextlib.suppress(OSError):  # what cannot be read is made anew
        for path in (cache_root() / "shared").glob(f"{name}-*"):
            if path.name == f"{name}-{_digest(path)}":
                return path
    return None


def keep(name: str, make: Callable[[Path], None]) -> Path:
    """A file that many builds are made with, made by `make(path)` where there is no whole one; the
    name must say all that it depends on. Where the cache cannot be written, it is this process's.
    """
    found = kept(name)
    if found is not None:
        return found
    folder = cache_root() / "shared"
    unique = f"{_BUILDING}{os.getpid()}-{threading.get_ident()}-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / unique).touch()
    except OSError:
        folder = Path(_private_directory().name)
    made = folder / unique
    try:
        make(made)
        return made.rename(folder / f"{name}-{_digest(made)}")
    finally:
        made.unlink(missing_ok=True)


def _is_in_progress(name: str) -> bool:
    """Whether a file of shared/ is being made, by a process that lives."""
    if not name.startswith(_BUILDING):
        return False
    try:
        os.kill(int(name.removeprefix(_BUILDING).partition("-")[0]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def list_entries() -> list[Published]:
    """The cache's finished builds, oldest first."""
    pattern = "[0-9a-f]" * CHAIN_HASH_DIGITS + f"/*/{MANIFEST_NAME}"
    entries = []
    for path in cache_root().glob(pattern):
        manifest = read_manifest(path.parent)
        if manifest is not None:
            entries.append(Published(path.parent, manifest))
    return sorted(entries, key=lambda entry: (entry.manifest.date, entry.directory))


def clear() -> int:
    """Empties the cache and returns how many builds that removed; those in progress go on."""
    root, count = cache_root(), len(list_entries())
    for path in root.glob("[0-9a-f]" * CHAIN_HASH_DIGITS):
        shutil.rmtree(path, ignore_errors=True)
    for name in ("quarantine", "failed", "facts"):
        shutil.rmtree(root / name, ignore_errors=True)
    for path in (root / "shared").glob("*"):
        if not _is_in_progress(path.name):
            path.unlink(missing_ok=True)
    for path in (root / "locks").glob("*"):
        with contextlib.suppress(OSError), open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_abandoned(root, path.name)
            path.unlink()
    return count - len(list_entries())


def _look_up(root: Path, entry: Entry, load: Callable[[Path], Loaded]) -> Loaded | None:
    """The published module, or None where there is none or it is damaged."""
    directory = entry.directory(root)
    manifest = read_manifest(directory)
    if manifest is None:
        return None
    try:
        path = directory / MODULE_NAME
        return load(path) if _digest(path) == manifest.sha256 else None
    except (ImportError, OSError, SystemError):
        return None


def _build(
    root: Path, entry: Entry, build: Callable[[Path], Path], load: Callable[[Path], Loaded]
) -> Loaded:
    """The module, built and published; the caller holds the entry's lock."""
    final = entry.directory(root)
    if final.exists():
        kept = _set_aside(final, root / "quarantine")
        warnings.warn(
            f"fusegen's cached build of {entry.chain_text!r} was damaged; it is kept in {kept} "
            "and built anew",
            stacklevel=3,
        )
    _remove_abandoned(root, entry.key)
    attempt = root / "building" / f"{entry.key}-{os.getpid()}"
    attempt.mkdir(parents=True)  # not mkdtemp, whose mode would keep a shared cache's readers out
    started = time.perf_counter()
    try:
        with _progress(entry):
            module_path = build(attempt)
        elapsed_seconds = time.perf_counter() - started
        module_path.replace(attempt / MODULE_NAME)
        _write_manifest(attempt, entry, elapsed_seconds)
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.replace(attempt, final)
        except OSError:  # where locks do not hold (some network file systems): another was first
            if read_manifest(final) is None:
                raise
    except BuildError as error:
        kept = _set_aside(attempt, root / "failed")
        raise BuildError(str(error).replace(str(attempt), str(kept))) from error
    finally:
        shutil.rmtree(attempt, ignore_errors=True)
    try:
        return load(final / MODULE_NAME)
    except (ImportError, OSError, SystemError) as error:
        kept = _set_aside(final, root / "failed")
        raise BuildError(
            f"the module built for {entry.chain_text!r} ({entry.target}) does not load: {error}; "
            f"it is kept in {kept}"
        ) from error


def _remove_abandoned(root: Path, key: str) -> None:
    """Removes a key's attempts; under its lock they can only be those of killed processes."""
    for path in (root / "building").glob(f"{key}-*"):
        shutil.rmtree(path, ignore_errors=True)


def _set_aside(directory: Path, shelf: Path) -> Path:
    """Moves a directory to a shelf that keeps the last few, and returns its new place."""
    shelf.mkdir(parents=True, exist_ok=True)
    kept = shelf / f"{time.time_ns()}-{directory.name}"
    os.replace(directory, kept)
    others = sorted(path for path in shelf.iterdir() if path != kept)
    for path in others[: 1 - SET_ASIDE_LIMIT]:
        shutil.rmtree(path, ignore_errors=True)
    return kept


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """A cache root of this process, removed when it ends."""
    return tempfile.TemporaryDirectory(prefix="fusegen-")


def read_manifest(directory: Path) -> Manifest | None:
    """What is recorded of the build in a directory; None where there is none."""
    try:
        return Manifest(**json.loads((directory / MANIFEST_NAME).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _write_manifest(directory: Path, entry: Entry, build_seconds: float) -> None:
    module = directory / MODULE_NAME
    manifest = Manifest(
        **asdict(entry),
        fusegen_version=__version__,
        sha256=_digest(module),
        size_bytes=module.stat().st_size,
        build_seconds=round(build_seconds, 3),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    (directory / MANIFEST_NAME).write_text(json.dumps(asdict(manifest), indent=2) + "\n")


def _write_whole(path: Path, text: str) -> None:
    """Writes a file so that no reader sees half of it."""
    temporary = path.with_name(f"{path.name}-{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


@contextlib.contextmanager
def _progress(entry: Entry) -> Iterator[None]:
    """A line on the terminal while a compiler runs; nothing where stderr is not one."""
    if not sys.stderr.isatty():
        yield
        return
    started = time.perf_counter()
    chain = entry.chain_text if len(entry.chain_text) <= 60 else entry.chain_text[:57] + "..."
    print(f"fusegen: building {chain} ({entry.target}) ...", end=" ", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
