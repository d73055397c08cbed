"""Atomic, strict, loud about damage, readable in a new process."""

import logging
import subprocess
import sys

import pytest
import torch

from impala.checkpoint import FORMAT, Checkpoints, check_vocabulary, vocabulary
from suites.suite import Spec


def state(frames):
    return {"frames": frames, "learner": {"agent": {"w": torch.full((3,), float(frames))}}}


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for frames in (900, 1000, 1100):
        checkpoints.save(state(frames))
    return checkpoints


def test_the_last_are_kept(checkpoints):
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
        "ckpt_1000.pt", "ckpt_1100.pt", "last.pt",
    ]  # fmt: skip
    assert checkpoints.load()["frames"] == 1100


def test_only_tensors_and_plain_types_in_a_new_process(checkpoints):
    code = "import sys, torch; print(torch.load(sys.argv[1], weights_only=True)['frames'])"
    run = subprocess.run(
        [sys.executable, "-c", code, str(checkpoints.folder / "last.pt")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == "1100"


@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "other"])
def test_a_damaged_file_falls_back_to_the_one_before_loudly(checkpoints, damage, caplog):
    for name in ("last.pt", "ckpt_1100.pt"):
        path = checkpoints.folder / name
        whole = path.read_bytes()
        path.write_bytes(
            {"empty": b"", "half": whole[: len(whole) // 2], "garbage": b"x" * 500}.get(damage, b"")
        )
        if damage == "other":
            torch.save({"something": 1}, path)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.load()["frames"] == 1000
    assert "last.pt is damaged" in caplog.text and "ckpt_1100.pt is damaged" in caplog.text


def test_a_file_that_lacks_what_is_needed_is_a_damaged_one(checkpoints):
    for lacking in ({"frames": "many", "learner": {}}, {"frames": 200}):
        torch.save({"format": FORMAT, **lacking}, checkpoints.folder / "last.pt")
        assert checkpoints.load()["frames"] == 1100


def test_never_from_scratch_unasked(checkpoints, tmp_path):
    for path in checkpoints.folder.iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="none of the 3 checkpoints"):
        checkpoints.load()
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint.*resume="):
        Checkpoints(tmp_path / "nothing").load()


def test_what_a_killed_save_left_goes_with_the_next(checkpoints):
    (checkpoints.folder / ".ckpt_1100.pt.4711").write_bytes(b"half")
    checkpoints.save(state(1200))
    assert len(list(checkpoints.folder.iterdir())) == 3


def test_a_run_whose_directory_was_removed_does_not_go_on_without_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"directory .*/gone is gone"):
        Checkpoints(tmp_path / "gone" / "checkpoints").save(state(100))


def test_a_failed_save_leaves_the_files_before_it(checkpoints, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("impala.checkpoint.os.fsync", full)
    with pytest.raises(OSError, match=r"cannot write to .*ckpt_1200.pt: No space left.* Make room"):
        checkpoints.save(state(1200))
    assert checkpoints.load()["frames"] == 1100
    assert len(list(checkpoints.folder.iterdir())) == 3


def test_an_agent_reads_the_words_that_it_learned():
    learned = Spec((1,), 2, 4, instruction_length=16, vocabulary_size=1000)
    saved = {"vocabulary": vocabulary(learned)}
    check_vocabulary(saved, learned)
    for other in (Spec((1,), 2, 4), Spec((1,), 2, 4, 16, 999), Spec((1,), 2, 4, 8, 1000)):
        with pytest.raises(ValueError, match="vocabulary_size"):
            check_vocabulary(saved, other)
