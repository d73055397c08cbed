"""The life of an actor's process."""

from __future__ import annotations

import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from impala.actor import SIGN_S
from impala.children import die_with_parent
from impala.cores import stay_on
from impala.crew import Crew
from impala.messages import Failed, Order, packed, unpacked
from impala.pace import Pace
from impala.remote_inference import ServerGone
from impala.transport.memory import Shared
from impala.transport.transport import ActorBuilder


def act(
    actor: int,
    builder: ActorBuilder,
    connection: Connection,
    server: Connection | None,
    crew: Crew,
    shared: Shared,
    *,
    seed: int,
    life: int,
    niceness: int,
    core: int | None,
    step_timeout_s: float | None,
) -> None:
    """Plays until there is no learner.

    server: who answers, where it is not the actor itself.
    core: that the actor stays on; None: any.
    """
    die_with_parent()
    os.nice(niceness)
    if core is not None:
        stay_on(core)
    torch.set_num_threads(1)
    # An environment that turns out to be slow takes two files, once it has a process of its own.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        beats = shared.beats()

        def orders() -> list[Order]:
            beats.plays(actor)
            received = []
            with _learner_needed():
                while connection.poll(0):
                    received.append(unpacked(connection.recv_bytes()))
            return received

        made = builder.build(
            actor, shared.storage(), seed, weights=shared.weights(builder.agent), server=server,
            ledger=shared.ledger(), crew=crew, life=life,
            watch=lambda task: beats.waits_for(actor, task), step_timeout_s=step_timeout_s,
            pace=Pace() if builder.move_slow else None,
        )  # fmt: skip
        shared.close()
        for said in made.play(orders, connection):
            with _learner_needed():
                if said is None:
                    connection.poll(SIGN_S)
                else:
                    connection.send_bytes(packed(said))
    except ServerGone:
        time.sleep(60.0)  # the learner says why, and ends this process
    except Exception:
        connection.send_bytes(packed(Failed(traceback.format_exc())))
        sys.exit(1)


@contextmanager
def _learner_needed() -> Iterator[None]:
    """Ends the process if the other end of the pipe is gone."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)
