import io
import time

import jax.numpy as jnp
import pytest

from m6jax.reporting import progress
from m6jax.reporting.progress import Pace, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_quiet_run_shows_results_alone(stream):
    shown = stream()
    with Progress(10, quiet=True, stream=shown) as progress:
        progress.update(1, "pseudo", loss=5.0)
        progress.say("saved step 1")
        progress.say("result   en: 2.1 bits per byte", result=True)
    assert shown.getvalue() == "result   en: 2.1 bits per byte\n"


def test_lines_where_there_is_no_terminal(clock):
    stream = io.StringIO()
    with Progress(1000, initial_step=100, stream=stream, every_seconds=30) as shown:
        shown.update(101, "pseudo", loss=5.12345, tokens_per_second=30123.0)
        for step in range(102, 122):
            clock.now += 2.0
            shown.update(step, "pseudo")
        shown.say("saved step 121")
        clock.now += 2.0
        shown.update(1000, "real", loss=4.0)

    assert stream.getvalue().splitlines() == [
        "pseudo: step 101/1000 (10%), loss 5.123, 30.1k tokens/s",
        # 15 steps took 30 s, 884 are left.
        "pseudo: step 116/1000 (11%), loss 5.123, 30.1k tokens/s, 29:28 left",
        "saved step 121",
        "real: step 1000/1000 (100%), loss 4, 30.1k tokens/s, 00:00 left",
    ]


def test_a_bar_on_a_terminal_with_messages_above():
    stream = Terminal()
    with Progress(10, initial_step=2, stream=stream) as shown:
        time.sleep(0.15)  # tqdm draws at most ten times a second
        shown.update(4, "pseudo", loss=5.0, tokens_per_second=2e6)
        shown.say("saved step 4")
        time.sleep(0.15)
        shown.update(10, "real")

    text = stream.getvalue()
    assert "saved step 4\n" in text
    assert text.count("\n") == 2  # the message's and the last
    frames = text.replace("\n", "\r").split("\r")
    assert any(f.startswith("pseudo:  40%|") and "4/10" in f for f in frames)
    assert any(f.startswith("real: 100%|") and "loss 5, 2.00M tokens/s]" in f for f in frames)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_disabled_shows_nothing(stream):
    with Progress(10, enabled=False, stream=stream) as shown:
        shown.update(10, "pseudo", loss=1.0)
        shown.say("hello")
    assert stream.getvalue() == ""


def test_standard_error_is_the_stream(capsys):
    with Progress(10) as shown:
        shown.update(1, "pseudo")
    assert capsys.readouterr() == ("", "pseudo: step 1/10 (10%)\n")


def test_pace_leaves_pauses_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    pace = Pace()
    for _ in range(2):
        with pace.waiting():
            now[0] += 0.75
        pace.add(jnp.float32(3), 4)
        now[0] += 2.25
    now[0] += 5.0
    pace.leave_out(5.0)
    assert pace.read() == {
        "step_seconds": 3.0,
        "tokens_per_second": 1.0,
        "data_wait_fraction": 0.25,
        "filled_fraction": 0.75,
    }
    pace.add(2, 4)
    now[0] += 4.0
    assert pace.read() == {
        "step_seconds": 4.0,
        "tokens_per_second": 0.5,
        "data_wait_fraction": 0.0,
        "filled_fraction": 0.5,
    }
