"""DeepMind Lab's level cache: what generating a map took seconds for, on disk for all processes."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

_SHARDS = 256  # folders, each trimmed alone
_DIGEST = hashlib.sha256
_ABANDONED_S = 3600.0  # a temporary file of this age has lost its writer


def default_folder() -> Path:
    """Of this user: in $XDG_CACHE_HOME, or else in ~/.cache."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(caches) if os.path.isabs(caches) else Path.home() / ".cache"
    return base / "impala" / "dmlab_levels"


class LevelCache:
    """What the engine calls with a map's key, and the path where it wants the map or has made it.

    Any number of processes may use the same folder. An entry is written under a temporary name,
    synced and renamed, and begins with a checksum of the map: the engine ends the process if it is
    promised a map and finds none or a damaged one. An entry that is damaged is removed and counts
    as a miss. What goes wrong with the disk costs the entry and never the game: it is logged once,
    and counted.

    folder: made if it is not there.
    most_bytes: of all entries together, about; the ones unused for longest are removed.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes_of_shard = most_bytes // _SHARDS
        self._counts = np.zeros(3, np.int32)
        self._warned = False

    def take_counts(self) -> np.ndarray:
        """int32 [3]: hits, misses and failures since the last call. A failure of reading is a miss
        as well."""
        counts, self._counts = self._counts, np.zeros(3, np.int32)
        return counts

    def fetch(self, key: str, pk3_path: str) -> bool:
        """Copies the entry to `pk3_path`; False if there is none that can be used."""
        found = self._fetched(self._entry(key), Path(pk3_path))
        self._counts[0 if found else 1] += 1
        return found

    def write(self, key: str, pk3_path: str) -> None:
        """Copies `pk3_path` into the cache."""
        entry = self._entry(key)
        try:
            content = Path(pk3_path).read_bytes()
            entry.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(entry, _DIGEST(content).digest() + content)
            self._trim(entry.parent)
        except OSError as error:
            self._failed(f"a map cannot be kept: {error}")

    def _fetched(self, entry: Path, path: Path) -> bool:
        try:
            found = entry.read_bytes()
            size = _DIGEST().digest_size
            if _DIGEST(found[size:]).digest() != found[:size]:
                self._failed(f"{entry} is damaged and will be made again")
                entry.unlink(missing_ok=True)
                return False
            os.utime(entry)  # used now
        except FileNotFoundError:
            return False
        except OSError as error:
            self._failed(f"an entry cannot be read: {error}")
            return False
        try:
            path.write_bytes(found[size:])
        except OSError as error:  # the engine will try to write it, too, and say if it cannot
            self._failed(f"a map cannot be given to the engine: {error}")
            path.unlink(missing_ok=True)
            return False
        return True

    def _entry(self, key: str) -> Path:
        return self._folder / _DIGEST(key.encode()).hexdigest()[:2] / key  # safe as a file's name

    def _trim(self, shard: Path) -> None:
        """Removes temporary files without a writer, and entries over the limit, oldest first."""
        entries = []
        for file in os.scandir(shard):
            try:
                stat = file.stat()
                if file.name.endswith(".tmp"):
                    if time.time() - stat.st_mtime > _ABANDONED_S:
                        os.unlink(file)
                else:
                    entries.append((stat.st_mtime, stat.st_size, file.path))
            except FileNotFoundError:  # another process removed it
                continue
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._most_bytes_of_shard:
                break
            Path(path).unlink(missing_ok=True)
            total -= size

    def _failed(self, what: str) -> None:
        self._counts[2] += 1
        if not self._warned:
            log.warning("level cache %s: %s. More of this is only counted", self._folder, what)
            self._warned = True


def _write_whole(path: Path, content: bytes) -> None:
    """All of it or nothing, whatever happens."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
