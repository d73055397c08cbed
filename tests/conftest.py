"""Tests share their cores with the processes they start: one thread each."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

DOUBLE = Path(__file__).parent / "engine"


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.dmlab)])
def lab(request, monkeypatch, tmp_path):
    """The module deepmind_lab, which children can import too: the one in `engine`, or the real."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("DMLAB_DOUBLE_TIME_SCALE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if request.param == "real":
        yield pytest.importorskip("deepmind_lab")
        return
    monkeypatch.delitem(sys.modules, "deepmind_lab", raising=False)
    monkeypatch.syspath_prepend(DOUBLE)
    yield importlib.import_module("deepmind_lab")
    del sys.modules["deepmind_lab"]
