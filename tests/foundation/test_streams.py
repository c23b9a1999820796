"""Messages end no run: characters, pipes and disks that do not take them."""

import io
import os
import subprocess
import sys

import pytest

from m6jax.foundation.streams import Lasting
from m6jax.reporting.progress import Progress

SAY = """
import sys
from m6jax.foundation.streams import lasting_streams
with lasting_streams():
    for number in range(2000):
        print("自然", number)
    print("done", file=sys.stderr)
"""


def test_a_character_that_the_terminal_does_not_know():
    kept = io.BytesIO()
    stream = Lasting(io.TextIOWrapper(kept, encoding="ascii"))
    assert stream.write("自 a\n") == 4
    stream.flush()
    assert kept.getvalue() == b"\\u81ea a\n"
    assert stream.encoding == "ascii"


class Full(io.StringIO):
    """A log on a full disk, which has room again later."""

    full = True

    def write(self, text):
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)

    def flush(self):
        self.write("")


def test_a_log_on_a_full_disk():
    log = Full()
    stream = Lasting(log)
    stream.write("lost\n")
    stream.flush()
    log.full = False
    stream.write("kept\n")
    assert log.getvalue() == "kept\n"


def test_a_stream_that_is_closed():
    log = io.StringIO()
    log.close()
    with Progress(10, stream=log) as progress:
        progress.say("nobody hears it")
        progress.update(10, "real", loss=1.0)
    Lasting(log).end()


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_process_whose_reader_leaves(encoding):
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", SAY],
        stdout=write,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    os.close(write)
    with open(read, "rb", buffering=0) as pipe:
        assert pipe.read(5) == "自然 ".encode(encoding, "backslashreplace")[:5]
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, b"done\n")


@pytest.mark.parametrize("mode", ["settings", "plan"])
def test_the_command_line_into_a_pipe_without_a_reader(mode):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "m6jax.main", f"--mode={mode}"]
    command += [] if mode == "settings" else ["--gin_file=configs/nowhere.gin"]
    process = subprocess.run(command, stdout=write, stderr=write, check=False, timeout=300)
    os.close(write)
    assert process.returncode == (0 if mode == "settings" else 2)
