"""Files are as they were or as they are now."""

import os
import pickle

import pytest

from impala.whole_file import DiskFull, write_whole


def test_a_file_is_replaced_as_it_was_given(tmp_path):
    write_whole(tmp_path / "a.csv", "before")
    write_whole(tmp_path / "a.csv", "é\r\n1\n")
    assert (tmp_path / "a.csv").read_bytes() == "é\r\n1\n".encode()
    assert os.listdir(tmp_path) == ["a.csv"]


def test_a_failure_leaves_the_file_before_and_nothing_else(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", "before")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull) as error:
        write_whole(tmp_path / "a", "after")
    assert str(error.value) == (
        f"cannot write to {tmp_path / 'a'}: No space left on device. Make room, then go on"
    )
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert (tmp_path / "a").read_text() == "before" and os.listdir(tmp_path) == ["a"]
