"""The level cache on disk, and the folders of engines."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from suites import level_cache
from suites.level_cache import LevelCache, default_folder
from suites.scratch import Scratch, sweep

PLENTY = 2**30
KEY = "a_map_aas_0123"


@pytest.fixture
def cache(tmp_path):
    return LevelCache(tmp_path / "cache", PLENTY)


@pytest.fixture
def pk3(tmp_path):
    """What the engine has made, and where it wants it."""
    (tmp_path / "made.pk3").write_bytes(b"a map" * 3000)
    return str(tmp_path / "made.pk3"), str(tmp_path / "wanted.pk3")


def entries(cache: LevelCache) -> list[Path]:
    return sorted(path for path in cache._folder.rglob("*") if path.is_file())


def test_what_was_written_is_fetched_also_by_others(cache, pk3):
    made, wanted = pk3
    assert not cache.fetch(KEY, wanted) and not Path(wanted).exists()
    cache.write(KEY, made)
    other = LevelCache(cache._folder, PLENTY)
    assert other.fetch(KEY, wanted)
    assert Path(wanted).read_bytes() == Path(made).read_bytes()
    assert not other.fetch("another", wanted)
    assert cache.take_counts().tolist() == [0, 1, 0]
    assert other.take_counts().tolist() == [1, 1, 0]
    assert other.take_counts().tolist() == [0, 0, 0]


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "directory"])
def test_a_damaged_entry_is_a_miss_and_is_made_again(cache, pk3, damage, caplog):
    made, wanted = pk3
    cache.write(KEY, made)
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    if damage == "directory":
        entry.unlink()
        entry.mkdir()
    else:
        changed = {"empty": b"", "cut": whole[:5000], "changed": whole[:-1] + b"x"}[damage]
        entry.write_bytes(changed)
    assert not cache.fetch(KEY, wanted) and not Path(wanted).exists()
    assert cache.take_counts().tolist() == [0, 1, 1]
    assert str(cache._folder) in caplog.text
    if damage != "directory":
        assert not entry.exists()
        cache.write(KEY, made)
        assert cache.fetch(KEY, wanted)


@pytest.mark.parametrize("call", ["fsync", "replace", "mkstemp"])
def test_a_full_disk_costs_the_entry_only(cache, pk3, call, monkeypatch, caplog):
    made, wanted = pk3

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp" if call == "mkstemp" else f"os.{call}", full)
    for _ in range(2):
        cache.write(KEY, made)
    assert entries(cache) == [] and not cache.fetch(KEY, wanted)
    assert cache.take_counts().tolist() == [0, 1, 2]
    assert caplog.text.count("No space left") == 1, "said once"


def test_a_map_that_cannot_be_given_is_not_promised(cache, pk3, tmp_path):
    cache.write(KEY, pk3[0])
    assert not cache.fetch(KEY, str(tmp_path / "nowhere" / "wanted.pk3"))
    assert cache.take_counts().tolist() == [0, 1, 1]


def write_for_ever(folder: Path, number: int) -> None:
    cache = LevelCache(folder, PLENTY)
    path = folder.parent / f"{number}.pk3"
    path.write_bytes(bytes([number]) * 500_000)
    while True:
        cache.write(KEY, str(path))


def test_writers_that_are_killed_leave_whole_entries_only(tmp_path):
    folder, wanted = tmp_path / "cache", tmp_path / "wanted.pk3"
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=write_for_ever, args=(folder, n), daemon=True) for n in (1, 2)
    ]
    for writer in writers:
        writer.start()
    cache, end, fetched = LevelCache(folder, PLENTY), time.monotonic() + 60, 0
    while fetched < 100:
        assert time.monotonic() < end
        if cache.fetch(KEY, str(wanted)):
            fetched += 1
            assert len(set(wanted.read_bytes())) == 1 and wanted.stat().st_size == 500_000
    for writer in writers:
        writer.kill()
        writer.join()
    assert cache.fetch(KEY, str(wanted)) and not cache.take_counts()[2]


def test_entries_unused_for_longest_make_room(tmp_path, pk3, monkeypatch):
    monkeypatch.setattr(level_cache, "_SHARDS", 1)
    made, wanted = pk3
    cache = LevelCache(tmp_path / "cache", 40_000)  # two of 15,000 bytes
    monkeypatch.setattr(LevelCache, "_entry", lambda self, key: self._folder / "all" / key)
    for age, key in enumerate("abc"):
        cache.write(key, made)
        os.utime(cache._entry(key), (1000 + age, 1000 + age))
        if key == "b":
            assert cache.fetch("a", wanted), "which is used now"
    assert [path.name for path in entries(cache)] == ["a", "c"]
    abandoned, fresh = cache._folder / "all" / ".x.tmp", cache._folder / "all" / ".y.tmp"
    abandoned.touch()
    fresh.touch()
    os.utime(abandoned, (1000, 1000))
    cache.write("a", made)
    assert fresh.exists() and not abandoned.exists()


def test_the_default_folder_is_among_the_users_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "impala" / "dmlab_levels"
    for unset in ("", "relative/path"):  # which the standard says to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_folder() == Path.home() / ".cache" / "impala" / "dmlab_levels"


# Folders of engines


def hold(connection) -> None:
    made = Scratch()
    (made.path / "file").touch()
    connection.send(made.path)
    connection.recv()


def test_folders_go_with_their_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs,), daemon=True)
    process.start()
    killed = ours.recv()
    mine = Scratch()
    sweep()
    assert mine.path.is_dir() and (killed / "file").exists(), "both are in use"
    assert mine.path.parent == killed.parent
    assert mine.path.parent.stat().st_mode & 0o777 == 0o700
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    other = Scratch()  # which sweeps, too
    assert not killed.exists() and mine.path.is_dir()
    for each in (mine, other, other):
        each.close()
    assert not list(mine.path.parent.iterdir())
