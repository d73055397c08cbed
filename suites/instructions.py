"""Instructions as word ids that are the same in every process and for ever."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4096)
def word_ids(instruction: str, length: int, vocabulary_size: int) -> np.ndarray:
    """int32 [length]: an id for each word, then zeros; words beyond `length` are left out.

    Words are what white space separates, as they are written. The id of one is its MD5 digest as a
    whole number, modulo vocabulary_size - 1, plus 1: different words may share it. The array is
    read-only.

    The idea, of 1000 hash buckets, is the IMPALA reference code's, whose hash is TensorFlow's;
    ids for words and 0 for padding are as in sample-factory.
    """
    ids = np.zeros(length, np.int32)
    for i, word in enumerate(instruction.split()[:length]):
        digest = hashlib.md5(word.encode(), usedforsecurity=False).digest()
        ids[i] = int.from_bytes(digest) % (vocabulary_size - 1) + 1
    ids.flags.writeable = False
    return ids
