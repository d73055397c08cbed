"""One line on a terminal, lines elsewhere."""

import io

import pytest

from suites import progress_line
from suites.progress_line import ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def now(monkeypatch):
    """The time, which only the test moves on."""
    time_s = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: time_s[0])
    return time_s


def test_on_a_terminal_one_line_is_drawn_anew_and_failures_stay_above_it(now, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "31")
    screen = Terminal()
    line = ProgressLine(4, screen)
    line.show(0, "begins")
    now[0] += 1.0
    line.show(1, "1 made")
    line.say("one failed")
    line.show(4, "a line that is longer than the screen")
    line.close()
    assert screen.getvalue().split("\r\x1b[K") == [
        "",
        "  0 %  begins; - left",
        " 25 %  1 made; 0:00:03 left",
        "one failed\n",
        " 25 %  1 made; 0:00:03 left",
        "100 %  a line that is longer t\n",
    ]


def test_elsewhere_there_is_a_line_now_and_then(now):
    file = io.StringIO()
    line = ProgressLine(3, file)
    line.show(0, "begins")
    line.show(1, "at once")
    now[0] += 6.0
    line.show(2, "later")
    line.say("one failed")
    line.show(3, "done")
    line.close()
    assert file.getvalue().splitlines() == [
        "  0 %  begins; - left",
        " 66 %  later; 0:00:03 left",
        "one failed",
        "100 %  done; 0:00:00 left",
    ]
