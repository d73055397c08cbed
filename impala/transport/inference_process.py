"""The process that answers all actors, and the learner's end of it."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from impala.actor_pool import actor_seeds
from impala.children import die_with_parent, how_it_ended, signals_held
from impala.crew import crew_size
from impala.inference_server import Batching, Server, join
from impala.transport.memory import Shared
from impala.transport.transport import ActorBuilder


class InferenceProcess:
    """Starts it; `control` is readable when it has failed."""

    def __init__(self, builder: ActorBuilder, shared: Shared, seed: int, life: int) -> None:
        sizes = [crew_size(crew) for crew in builder.crews]
        self._first = [sum(sizes[:actor]) for actor in range(len(sizes))]
        context = multiprocessing.get_context("spawn")
        self.control, theirs = context.Pipe(duplex=True)
        self._process: BaseProcess = context.Process(
            target=_serve,
            name="inference",
            args=(builder, theirs, shared, sizes, actor_seeds(seed, len(sizes), 0, life)[0]),
            daemon=True,
        )
        with signals_held():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def pipe(self, actor: int) -> Connection:
        """A new one, whose other end the server has, for an actor to ask through."""
        ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=True)
        with suppress(BrokenPipeError, ConnectionResetError):  # it died, as `control` will show
            join(self.control, self.pid, actor, self._first[actor], theirs)
        theirs.close()
        return ours

    def cause_of_death(self) -> str:
        try:
            return self.control.recv_bytes().decode()
        except (EOFError, OSError):
            self._process.join(5.0)
            return how_it_ended(self._process.exitcode)

    def close(self) -> None:
        self.control.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _serve(
    builder: ActorBuilder,
    control: Connection,
    shared: Shared,
    sizes: Sequence[int],  # environments of each actor
    seed: int,
) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    try:
        batching = builder.batching
        assert isinstance(batching, Batching)
        server = Server(
            builder.agent,
            shared.weights(builder.agent),
            shared.storage(),
            num_environments=sum(sizes),
            most=max(sizes),
            num_actions=builder.num_actions,
            batching=batching,
            device=torch.device(batching.device),
            seed=seed,
            answers=shared.answers(),
        )
        shared.close()
        server.serve(control)
    except Exception:
        control.send_bytes(traceback.format_exc().encode())
        sys.exit(1)
