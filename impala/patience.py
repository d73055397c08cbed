"""How long others may take to answer."""

from __future__ import annotations

import time

PAUSE_S = 5.0  # less is no pause, however short the time-out: some ask once a second


class Patience:
    """Finds who is overdue, by a process that may be stopped itself.

    After Ctrl-Z and `fg`, or when a debugger let the program go on, everybody seems to be overdue:
    so whoever asks after a long time gives the others all of their time anew.

    timeout_s: None: for ever.
    setting: what gives it, for messages.
    """

    def __init__(self, timeout_s: float | None, setting: str = "restarts.step_timeout_s") -> None:
        self._setting = setting
        self._timeout_s = float("inf") if timeout_s is None else timeout_s
        self._woke_s = self._then_s = time.monotonic()

    def __str__(self) -> str:
        return f"{self._timeout_s:g} s ({self._setting})"

    def horizon_s(self) -> float:
        """What began before this time, and has not ended, takes too long. To be asked often.

        By the monotonic clock, which is one for all processes of a machine.
        """
        now_s = time.monotonic()
        if now_s - self._then_s > max(self._timeout_s / 2, PAUSE_S):
            self._woke_s = now_s
        self._then_s = now_s
        horizon_s = now_s - self._timeout_s
        return horizon_s if horizon_s > self._woke_s else float("-inf")
