"""Calls a function many times in processes of their own, of which any may crash."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple


class Failure(NamedTuple):
    """A call raised, or its process ended."""

    cause: str


def each_apart(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], workers: int, log: Path
) -> Generator[tuple[tuple[Any, ...], Any]]:
    """(arguments, result or `Failure`) of each call, as they are done.

    Processes are spawned, and one that ends is replaced. They end with this one.

    log: where they print to.
    """
    waiting = deque(calls)
    processes: dict[Connection, BaseProcess] = {}
    called: dict[Connection, tuple[Any, ...]] = {}
    try:
        while waiting or called:
            while waiting and len(called) < workers:
                free = [connection for connection in processes if connection not in called]
                connection = free[0] if free else _start(function, log, processes)
                called[connection] = waiting.popleft()
                connection.send(called[connection])
            for connection in wait(list(called)):
                assert isinstance(connection, Connection)
                arguments = called.pop(connection)
                try:
                    result = connection.recv()
                except (EOFError, ConnectionResetError):
                    process = processes.pop(connection)
                    process.join()
                    result = Failure(f"its process ended with exit code {process.exitcode}")
                yield arguments, result
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.join()


def _start(
    function: Callable[..., Any], log: Path, processes: dict[Connection, BaseProcess]
) -> Connection:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs, log), daemon=True)
    process.start()
    theirs.close()
    processes[ours] = process
    return ours


def _serve(function: Callable[..., Any], connection: Connection, log: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            arguments = connection.recv()
            try:
                result = function(*arguments)
            except Exception as error:
                traceback.print_exc()
                result = Failure(f"{type(error).__name__}: {error}")
            connection.send(result)
