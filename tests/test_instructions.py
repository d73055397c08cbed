"""Word ids: the same in every process and for ever."""

import os
import subprocess
import sys

import numpy as np
import pytest

from suites.instructions import word_ids

KNOWN = {  # runs that are resumed rely on these
    "Is any hat blue?": [934, 617, 897, 366],
    "jug near balloon": [597, 71, 206],
}


def test_known_words_have_the_ids_that_they_always_had():
    for text, ids in KNOWN.items():
        assert word_ids(text, 16, 1000).tolist() == ids + [0] * (16 - len(ids))


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_ids_do_not_depend_on_the_process(seed):
    text, ids = next(iter(KNOWN.items()))
    code = f"from suites.instructions import word_ids; print(word_ids({text!r}, 4, 1000))"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert [int(word) for word in printed.strip("[] \n").split()] == ids


def test_words_are_what_white_space_separates():
    ids = word_ids("  red\tchair \n", 4, 1000)
    assert ids.dtype == np.int32 and ids.shape == (4,)
    assert ids.tolist() == word_ids("red chair", 4, 1000).tolist()
    assert ids[:2].all() and not ids[2:].any()
    assert word_ids("Red chair", 2, 1000)[0] != ids[0]
    assert not word_ids("", 4, 1000).any()
    assert word_ids("a b c", 2, 1000).tolist() == word_ids("a b", 2, 1000).tolist()


@pytest.mark.parametrize("size", [2, 3, 10])
def test_ids_fill_the_vocabulary_and_are_never_padding(size):
    words = " ".join(map(str, range(200)))
    assert set(word_ids(words, 200, size).tolist()) == set(range(1, size))
