"""The cache on its own: the "modules" here are text files, so that a build costs nothing."""

import errno
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from fusegen import cache, locking
from fusegen.errors import BuildError, CacheError

ENTRY = cache.Entry(
    chain_text="leaky_relu(0.2) | gelu",
    chain_hash="3f" * 32,
    target="cpp",
    key=cache.build_key("leaky_relu"),
    fingerprint={"cxx": "g++ 12"},
)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(path))
    monkeypatch.delenv("FUSEGEN_NO_BUILD", raising=False)
    cache._private_directory.cache_clear()
    return path


class Builder:
    """Writes a module of the given text and counts how often it was asked to."""

    def __init__(self, text="module"):
        self.text, self.calls = text, 0

    def __call__(self, directory):
        self.calls += 1
        (directory / "source.cpp").write_text("int source;")
        path = directory / "built.so"
        path.write_text(self.text)
        return path


def load(path):
    text = path.read_text()
    if text.startswith("bad"):
        raise ImportError(f"{text} cannot be loaded")
    return text


def never(directory):
    raise AssertionError("built although it was in the cache")


def contents(path):
    return sorted(child.name for child in path.iterdir()) if path.exists() else []


# In a process of its own. argv: a log to append to, seconds that the build takes.
CHILD = f"""
import os, sys, time
from fusegen import cache, locking
log, seconds = sys.argv[1], float(sys.argv[2])
def build(directory):
    with open(log, "a") as file:
        file.write("building\\n")
    time.sleep(seconds)
    (directory / "built.so").write_text("module")
    return directory / "built.so"
entry = cache.Entry({ENTRY.chain_text!r}, {ENTRY.chain_hash!r}, "cpp", {ENTRY.key!r}, {{}})
print(cache.load_or_build(entry, build, lambda path: path.read_text()))
"""


def start_child(log, seconds):
    command = [sys.executable, "-c", CHILD, str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(path, limit_seconds=20):
    deadline = time.monotonic() + limit_seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_a_second_load_finds_what_the_first_one_built(root):
    assert cache.load_or_build(ENTRY, Builder(), load) == "module"
    assert cache.load_or_build(ENTRY, never, load) == "module"
    assert contents(ENTRY.directory(root)) == ["manifest.json", "module.so", "source.cpp"]
    assert contents(root / "building") == []


def test_the_manifest_says_what_was_built_and_from_what(root):
    cache.load_or_build(ENTRY, Builder(), load)
    (published,) = cache.list_entries()
    assert published.directory == ENTRY.directory(root)
    assert published.manifest.chain_text == "leaky_relu(0.2) | gelu"
    assert published.manifest.chain_hash == "3f" * 32
    assert published.manifest.target == "cpp"
    assert published.manifest.fingerprint == {"cxx": "g++ 12"}
    assert published.manifest.size_bytes == len("module")
    assert published.manifest.date.endswith("+00:00")


def test_a_published_build_is_as_readable_as_the_umask_allows(root):
    cache.load_or_build(ENTRY, Builder(), load)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(ENTRY.directory(root).stat().st_mode) == 0o777 & ~umask


def test_keys_tell_apart_what_joins_to_the_same_text():
    assert cache.build_key("ab", "c") != cache.build_key("a", "bc")
    assert cache.build_key("ab") != cache.build_key("ab", "")
    assert cache.build_key("1:a", "") != cache.build_key("1", "a")
    assert cache.build_key("ab", "c") == cache.build_key("ab", "c")


def test_two_processes_that_race_build_once_and_both_load(tmp_path):
    log = tmp_path / "log"
    children = [start_child(log, 0.5) for _ in range(2)]
    assert [child.communicate(timeout=20)[0] for child in children] == ["module\n"] * 2
    assert log.read_text() == "building\n"


def test_two_threads_that_race_build_once(root):
    builder, loaded = Builder(), []

    def slow(directory):
        time.sleep(0.2)
        return builder(directory)

    threads = [
        threading.Thread(target=lambda: loaded.append(cache.load_or_build(ENTRY, slow, load)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert loaded == ["module", "module"]
    assert builder.calls == 1


def test_a_killed_builder_leaves_nothing_that_stops_the_next_one(root, tmp_path):
    log = tmp_path / "log"
    child = start_child(log, 60)
    wait_for(log)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=20)
    assert len(contents(root / "building")) == 1  # what it had begun
    started = time.monotonic()
    assert cache.load_or_build(ENTRY, Builder(), load) == "module"
    assert time.monotonic() - started < 5
    assert contents(root / "building") == []


@pytest.mark.parametrize("damage", ["truncated", "changed", "module gone", "manifest garbled"])
def test_a_damaged_build_is_set_aside_and_built_anew(root, damage):
    cache.load_or_build(ENTRY, Builder(), load)
    directory = ENTRY.directory(root)
    if damage == "module gone":
        (directory / "module.so").unlink()
    elif damage == "manifest garbled":
        (directory / "manifest.json").write_text('{"chain_text": "leaky')
    else:
        (directory / "module.so").write_text("modu" if damage == "truncated" else "mudole")
    builder = Builder()
    with pytest.warns(UserWarning, match=r"leaky_relu\(0.2\) \| gelu' was damaged.*quarantine"):
        assert cache.load_or_build(ENTRY, builder, load) == "module"
    assert builder.calls == 1
    assert len(contents(root / "quarantine")) == 1
    assert cache.load_or_build(ENTRY, never, load) == "module"


def test_a_module_with_a_right_checksum_that_does_not_load_is_built_anew(root):
    with pytest.raises(BuildError):
        cache.load_or_build(ENTRY, Builder("bad"), load)
    (failed,) = (root / "failed").iterdir()
    ENTRY.directory(root).parent.mkdir(exist_ok=True)
    failed.rename(ENTRY.directory(root))  # whole, manifest and all
    with pytest.warns(UserWarning, match="was damaged"):
        assert cache.load_or_build(ENTRY, Builder(), load) == "module"
    assert len(contents(root / "quarantine")) == 1


def test_a_fresh_build_that_does_not_load_is_an_error_and_not_kept_as_a_hit(root):
    with pytest.raises(
        BuildError, match=r"gelu' \(cpp\) does not load: bad cannot be loaded.*fail"
    ):
        cache.load_or_build(ENTRY, Builder("bad"), load)
    assert not ENTRY.directory(root).exists()


def test_a_failed_build_keeps_its_source_and_says_where(root):
    def fail(directory):
        (directory / "source.cpp").write_text("int broken")
        raise BuildError(f"look at {directory}/source.cpp")

    with pytest.raises(BuildError) as caught:
        cache.load_or_build(ENTRY, fail, load)
    kept = Path(str(caught.value).removeprefix("look at "))
    assert kept.read_text() == "int broken"
    assert kept.parent.parent == root / "failed"
    assert cache.load_or_build(ENTRY, Builder(), load) == "module"


def test_what_is_set_aside_is_bounded(root):
    def fail(directory):
        raise BuildError("no")

    for _ in range(cache.SET_ASIDE_LIMIT + 3):
        with pytest.raises(BuildError):
            cache.load_or_build(ENTRY, fail, load)
    assert len(contents(root / "failed")) == cache.SET_ASIDE_LIMIT


def test_an_interrupted_build_leaves_no_trace(root):
    def interrupt(directory):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.load_or_build(ENTRY, interrupt, load)
    assert contents(root / "building") == contents(root / "failed") == []


@pytest.fixture
def make_read_only(monkeypatch):
    """Refuses writes under a directory, as a read-only mount would; chmod does not stop root."""

    def refuse_below(root):
        def guard(name, writes=lambda *arguments: True):
            original = getattr(os, name)

            def guarded(path, *arguments, **keywords):
                if str(path).startswith(str(root)) and writes(*arguments):
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
                return original(path, *arguments, **keywords)

            monkeypatch.setattr(os, name, guarded)

        for name in ("mkdir", "replace", "rename", "unlink"):
            guard(name)
        guard("open", lambda flags=0, *rest: flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    return refuse_below


def test_a_read_only_cache_still_serves_hits(root, make_read_only):
    cache.load_or_build(ENTRY, Builder(), load)
    make_read_only(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load_or_build(ENTRY, never, load) == "module"


def test_a_miss_in_a_read_only_cache_warns_and_builds_for_this_process(root, make_read_only):
    cache.load_or_build(ENTRY, Builder(), load)
    make_read_only(root)
    other, builder = replace(ENTRY, key=cache.build_key("other")), Builder()
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"cannot write.*Read-only.*FUSEGEN_CACHE_DIR"):
            assert cache.load_or_build(other, builder, load) == "module"
    assert builder.calls == 1
    assert not other.directory(root).exists()


def test_a_damaged_build_in_a_read_only_cache_is_replaced_for_this_process(root, make_read_only):
    cache.load_or_build(ENTRY, Builder(), load)
    (ENTRY.directory(root) / "module.so").write_text("modu")
    make_read_only(root)
    with pytest.warns(UserWarning, match="cannot write"):
        assert cache.load_or_build(ENTRY, Builder(), load) == "module"


def test_a_cache_that_cannot_exist_is_as_good_as_a_read_only_one(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"cannot write.*Not a directory"):
        assert cache.load_or_build(ENTRY, Builder(), load) == "module"
    assert cache.remember("question", lambda: "answer") == "answer"
    assert cache.list_entries() == []


def test_no_build_turns_a_miss_into_an_error_that_names_the_chain(root, monkeypatch):
    monkeypatch.setenv("FUSEGEN_NO_BUILD", "1")
    with pytest.raises(CacheError) as caught:
        cache.load_or_build(ENTRY, never, load)
    for words in ("leaky_relu(0.2) | gelu", ENTRY.key, str(root), "FUSEGEN_NO_BUILD"):
        assert words in str(caught.value)


def test_no_build_allows_a_hit(monkeypatch):
    cache.load_or_build(ENTRY, Builder(), load)
    monkeypatch.setenv("FUSEGEN_NO_BUILD", "true")
    assert cache.load_or_build(ENTRY, never, load) == "module"


@pytest.mark.parametrize("value", ["", "0", "no", "False"])
def test_no_build_can_be_switched_off(monkeypatch, value):
    monkeypatch.setenv("FUSEGEN_NO_BUILD", value)
    assert not cache.environment().no_build


def test_no_build_with_an_unknown_word_is_an_error(monkeypatch):
    monkeypatch.setenv("FUSEGEN_NO_BUILD", "maybe")
    with pytest.raises(CacheError, match=r"FUSEGEN_NO_BUILD is 'maybe'.*1, true, yes, on, 0"):
        cache.environment()


@pytest.mark.parametrize(
    ("named", "xdg", "expected"),
    [
        ("/somewhere", "/xdg", "/somewhere"),
        ("~/mine", "/xdg", "/home/her/mine"),
        ("", "/xdg", "/xdg/fusegen"),
        ("", "relative", "/home/her/.cache/fusegen"),
        ("", "", "/home/her/.cache/fusegen"),
    ],
)
def test_the_root_follows_the_environment(monkeypatch, named, xdg, expected):
    monkeypatch.setenv("HOME", "/home/her")
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", named)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache.cache_root() == Path(expected)


def test_list_is_oldest_first_and_clear_empties(root):
    for date, name in (("2026-02-01", "late"), ("2026-01-01", "early")):
        entry = replace(ENTRY, key=cache.build_key(name), chain_text=name)
        cache.load_or_build(entry, Builder(), load)
        path = entry.directory(root) / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"date": date}))
    cache.remember("question", lambda: "answer")
    assert [entry.manifest.chain_text for entry in cache.list_entries()] == ["early", "late"]
    assert cache.clear() == 2
    assert cache.list_entries() == []
    assert contents(root) == ["building", "locks"]
    assert contents(root / "locks") == contents(root / "building") == []
    assert cache.clear() == 0


def test_clear_leaves_a_build_in_progress_alone(root):
    begun, go_on, loaded = threading.Event(), threading.Event(), []

    def slow(directory):
        begun.set()
        assert go_on.wait(timeout=20)
        return Builder()(directory)

    thread = threading.Thread(target=lambda: loaded.append(cache.load_or_build(ENTRY, slow, load)))
    thread.start()
    assert begun.wait(timeout=20)
    cache.clear()
    go_on.set()
    thread.join(timeout=20)
    assert loaded == ["module"]
    assert cache.load_or_build(ENTRY, never, load) == "module"


def test_a_waiter_whose_lock_file_was_cleared_takes_the_new_one(root, monkeypatch):
    original, removed = locking.fcntl.flock, []

    def flock(lock, operation):
        if not removed:
            removed.append(True)
            (root / "locks" / ENTRY.key).unlink()
        original(lock, operation)

    monkeypatch.setattr(locking.fcntl, "flock", flock)
    lock = locking.acquire(root / "locks" / ENTRY.key)
    assert os.path.samestat(os.fstat(lock), os.stat(root / "locks" / ENTRY.key))
    locking.release(lock)


def forked(function):
    """A child that runs a function, and ends."""
    child = os.fork()
    if child == 0:
        function()
        os._exit(0)
    return child


def ended(child):
    """Whether it ends within five seconds; if not, it is killed."""
    for _ in range(100):
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_a_forked_child_holds_no_lock_of_its_parent(root):
    path, held = root / "locks" / ENTRY.key, locking.open_lock()
    lock = locking.acquire(path)
    with held:
        sleeper = forked(lambda: time.sleep(60))
        waiter = forked(lambda: locking.release(locking.acquire(path)))
        taker = forked(held.acquire)
        assert ended(taker)
        locking.release(lock)
        assert ended(waiter)  # though the sleeper has the descriptor that its parent had
    os.kill(sleeper, signal.SIGKILL)
    os.waitpid(sleeper, 0)


def test_an_answer_is_asked_for_once():
    assert cache.remember("which version?", lambda: "12") == "12"
    assert cache.remember("which version?", lambda: "13") == "12"
    assert cache.remember("which other version?", lambda: "13") == "13"


@pytest.mark.parametrize("damage", ["", "12", "{digest}\n13", "\0" * 40])
def test_an_answer_that_is_damaged_is_asked_for_again(root, damage):
    assert cache.remember("which version?", lambda: "12") == "12"
    (path,) = (root / "facts").iterdir()
    path.write_text(damage.format(digest=path.read_text().partition("\n")[0]))
    assert cache.remember("which version?", lambda: "14") == "14"
    assert cache.remember("which version?", lambda: "15") == "14"


def test_clearing_leaves_what_a_living_process_makes(root):
    ended_child = forked(lambda: None)
    assert ended(ended_child)
    (root / "shared").mkdir(parents=True)
    (root / "shared" / f"building-{ended_child}-1-binding").touch()

    def make(path):
        cache.clear()
        assert [p.name for p in (root / "shared").iterdir()] == [path.name]
        path.write_text("an object")

    assert cache.keep("binding", make).read_text() == "an object"


def test_an_answer_to_another_question_is_none(root):
    cache.remember("which version?", lambda: "12")
    (first,) = (root / "facts").iterdir()
    cache.remember("which other version?", lambda: "13")
    (second,) = (p for p in (root / "facts").iterdir() if p != first)
    second.write_bytes(first.read_bytes())
    assert cache.remember("which other version?", lambda: "14") == "14"


def test_an_answer_that_is_not_sure_is_not_kept():
    assert cache.remember("which version?", lambda: "12", is_sure=lambda: False) == "12"
    assert cache.remember("which version?", lambda: "13") == "13"


def test_a_path_that_ninja_cannot_build_in_is_told(monkeypatch, tmp_path):
    for name, character in (("a:b", ":"), ("a$b", "$")):
        monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / name))
        with pytest.raises(CacheError, match=re.escape(f"has a {character!r}, with which ninja")):
            cache.cache_root()


def test_what_is_set_aside_last_is_kept_whatever_the_clock_said(tmp_path):
    shelf = tmp_path / "failed"
    for i in range(cache.SET_ASIDE_LIMIT + 2):
        (shelf / f"{9 * 10**18 + i}-of-the-future").mkdir(parents=True)
    (tmp_path / "attempt").mkdir()
    kept = cache._set_aside(tmp_path / "attempt", shelf)
    assert kept.is_dir()
    assert len([*shelf.iterdir()]) == cache.SET_ASIDE_LIMIT


def test_a_cache_that_cannot_be_used_is_told(root):
    root.mkdir(exist_ok=True)
    (root / "building").write_text("a file where a directory is to be")
    with pytest.raises(CacheError, match=r"cannot be used to build .* make room and"):
        cache.load_or_build(ENTRY, lambda directory: directory, lambda path: path)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_file_is_kept_until_it_is_damaged(root):
    made = []

    def make(path):
        made.append(path)
        path.write_text("an object")

    first = cache.keep("binding", make)
    assert cache.keep("binding", make) == first
    assert len(made) == 1
    assert cache.keep("another", make) != first
    first.write_text("an obj")
    assert cache.keep("binding", make).read_text() == "an object"
    assert len(made) == 3
    assert len(list((root / "shared").iterdir())) == 2
    assert stat.S_IMODE(first.stat().st_mode) == 0o644


def test_a_file_that_cannot_be_made_leaves_no_trace(root):
    def make(path):
        path.write_text("half of it")
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        cache.keep("binding", make)
    assert not list((root / "shared").iterdir())


def test_a_file_is_this_processs_own_where_the_cache_is_read_only(root, make_read_only):
    root.mkdir()
    make_read_only(root)
    path = cache.keep("binding", lambda path: path.write_text("an object"))
    assert path.read_text() == "an object"
    assert root not in path.parents


def test_a_build_shows_a_line_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    cache.load_or_build(ENTRY, Builder(), load)
    assert terminal.getvalue() == "fusegen: building leaky_relu(0.2) | gelu (cpp) ... 0.0 s\n"
    cache.load_or_build(ENTRY, never, load)
    assert terminal.getvalue().count("\n") == 1


def test_a_build_is_silent_where_stderr_is_no_terminal(capsys):
    cache.load_or_build(ENTRY, Builder(), load)
    assert capsys.readouterr() == ("", "")
