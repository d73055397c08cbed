"""An actor's side of the process that answers: see `impala.inference_server`."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from impala.inference import Question
from impala.trajectory import Step, map_structure

ASK, VALUE = b"q", b"v"  # what a message is about


class ServerGone(EOFError):
    """The other end of the pipe to the server is closed."""


class RemoteInference:
    """See `impala.inference.Inference`: an actor's pipe to the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answered: list[int] = []

    @property
    def connection(self) -> Connection | None:
        return self._connection

    def ask(self, questions: Sequence[Question]) -> None:
        parts = [
            np.array([q.group, q.slots.start, q.slots.stop, q.t, *q.environments], np.int64)
            for q in questions
        ]
        self._send(ASK + np.concatenate(parts).tobytes())

    def answered(self) -> list[int]:
        while self._connection.poll(0):
            _, message = self._message()
            self._answered += np.frombuffer(message, np.int64).tolist()
        answered, self._answered = self._answered, []
        return answered

    def value(self, step: Step, environments: NDArray[np.int64]) -> NDArray[np.float32]:
        numbers = map_structure(lambda leaf: leaf.numpy(), step)
        self._send(VALUE + pickle.dumps((numbers, environments)))
        while True:  # answers to questions may come first
            kind, message = self._message()
            if kind == VALUE:
                return np.frombuffer(message, np.float32)
            self._answered += np.frombuffer(message, np.int64).tolist()

    def _message(self) -> tuple[bytes, bytes]:
        try:
            message = self._connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            raise ServerGone from None
        return message[:1], message[1:]

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            raise ServerGone from None
