"""Unfinished files: nobody else's, never through a link, and gone when their writers are."""

import errno
import fcntl
import multiprocessing
import os
import resource
import signal

import pytest
from killed_writes import EVERY_CALL, after_kills

from gradweave import Trace, load_trace
from gradweave._src import files, partials

SPAWN = multiprocessing.get_context("spawn")


def unfinished(folder):
    return [path for path in folder.rglob("*") if path.name.endswith(partials.SUFFIX)]


def write_often(path, number, stop):
    """As a container does in which every training has the same process id."""
    os.getpid = lambda: 7
    trace = load_trace("alexnet").with_bytes_per_element(1 + number)
    while not stop.is_set():
        files.write(path, trace)


def test_writers_with_the_same_process_id_do_not_meet(tmp_path):
    path, stop = tmp_path / "trace.json", SPAWN.Event()
    files.write(path, load_trace("alexnet"))
    writers = [SPAWN.Process(target=write_often, args=(path, n, stop)) for n in range(3)]
    for writer in writers:
        writer.start()
    for _ in range(200):
        assert files.read(path, Trace).name == "alexnet"
    stop.set()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_an_unfinished_file_is_not_followed(tmp_path, monkeypatch):
    """Even by somebody who can tell what it will be called."""
    monkeypatch.setattr(partials.secrets, "token_hex", lambda _: "known")
    victim, path = tmp_path / "victim", tmp_path / "trace.json"
    victim.write_text("untouched")
    (tmp_path / ".trace.json.known.partial").symlink_to(victim)
    with pytest.raises(FileExistsError) as caught:
        files.write(path, load_trace("alexnet"))
    assert caught.value.filename == str(path)
    assert victim.read_text() == "untouched"
    assert not path.exists()


def begin_and_wait(path, begun):
    with files.replacing(path) as file:
        file.write(b"half")
        file.flush()
        begun.set()
        signal.pause()


def begin_folder_and_wait(path, begun):
    with partials.partial_folder(path) as folder:
        (folder / "trace.json").write_text("half")
        begun.set()
        signal.pause()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_a_killed_writer_leaves_is_cleared_away_by_the_next(tmp_path, what):
    path, begun = tmp_path / "trace.json", SPAWN.Event()
    begin, given = (begin_and_wait, path) if what == "file" else (begin_folder_and_wait, tmp_path)

    def write():
        if what == "file":
            files.write_text(path, "{}")
        else:
            with partials.partial_folder(tmp_path):
                pass

    writer = SPAWN.Process(target=begin, args=(given, begun))
    writer.start()
    assert begun.wait(60)
    write()
    assert len(unfinished(tmp_path)) == 1, "of one that still writes nothing is cleared away"
    writer.kill()
    writer.join()
    assert len(unfinished(tmp_path)) == 1
    write()
    assert unfinished(tmp_path) == []


def test_what_is_not_unfinished_is_left_alone(tmp_path):
    others = [".other.json.1234.partial", "trace.json.1234.partial", ".trace.json.old"]
    for name in others:
        (tmp_path / name).touch()
    files.write_text(tmp_path / "trace.json", "{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "trace.json"])


def test_on_a_disk_without_locks_nothing_is_cleared_away(tmp_path, monkeypatch):
    def without_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".trace.json.1234.partial").touch()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    files.write_text(tmp_path / "trace.json", "{}")
    assert (tmp_path / "trace.json").read_text() == "{}"
    assert len(unfinished(tmp_path)) == 1


def test_one_that_was_cleared_away_too_early_is_begun_again(tmp_path, monkeypatch):
    """Between making a file and locking it somebody may take it for left behind."""
    lock, cleared = fcntl.flock, []

    def clear_first(descriptor, operation):
        if not cleared:
            cleared.extend(unfinished(tmp_path))
            cleared[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", clear_first)
    files.write_text(tmp_path / "trace.json", "{}")
    assert len(cleared) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_what_cannot_be_written_is_named_as_people_know_it(tmp_path, monkeypatch, code):
    """A folder that is read-only, for one: not by the name of a file that nobody has heard of."""

    def refused(path, *_):
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(partials.os, "open", refused)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        files.write_text(tmp_path / "trace.json", "{}")
    assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / "trace.json"))


def test_a_full_disk_leaves_what_was_there(tmp_path):
    path = tmp_path / "trace.json"
    files.write_text(path, "before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            files.write_text(path, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_names_as_long_as_a_disk_takes_them(tmp_path):
    path = tmp_path / ("é" * 127)
    files.write_text(path, "{}")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("most", [12, pytest.param(EVERY_CALL, marks=pytest.mark.long)])
def test_a_kill_at_any_call_leaves_the_old_file_or_the_new_one(tmp_path, most):
    told = after_kills("trace", tmp_path, most=most)
    assert set(told["found"]) == {"old", "new"}
    assert told["stops"] > 20
    assert sum(told["found"].values()) == told["stops"] or most < told["stops"]
    assert (told["left"], told["last"]) == (0, "new")


@pytest.mark.parametrize("most", [20, pytest.param(EVERY_CALL, marks=pytest.mark.long)])
def test_a_kill_at_any_call_leaves_no_half_of_a_run(tmp_path, most):
    """The old one, the new one, or one that has not ended, which nobody takes for a run."""
    told = after_kills("run", tmp_path, most=most)
    assert {"old", "new"} <= set(told["found"]) <= {"old", "new", "none"}
    assert (told["left"], told["last"]) == (0, "new")
