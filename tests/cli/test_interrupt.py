"""Signals and a closed pipe end the command in time and without a traceback."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from streams import as_in_a_shell

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def answering(tiny):
    """Two commands amid a long answer, five bytes of which were read."""
    folder = str(tiny("llama", max_position_embeddings=20_000))
    command = (sys.executable, "-m", "lean", "run", folder, "hi", "--max-tokens", "19000", "--ignore-eos")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    alone = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "preexec_fn": as_in_a_shell()}
    processes = [subprocess.Popen(command, **pipes, **alone) for _ in range(2)]
    watchdog = threading.Timer(120, lambda: [process.kill() for process in processes])
    watchdog.start()
    assert [len(process.stdout.read(5)) for process in processes] == [5, 5]
    yield processes
    watchdog.cancel()
    for process in processes:
        process.kill()


def test_a_reader_that_leaves_ends_the_answer_without_a_traceback(answering):
    answering[0].stdout.close()
    err = answering[0].stderr.read().decode()
    assert answering[0].wait(timeout=30) == 0
    assert not any(word in err for word in ("Traceback", "ignored", "Broken"))


def test_an_interrupt_ends_the_answer_within_two_seconds(answering):
    sent = time.monotonic()
    answering[1].send_signal(signal.SIGINT)
    lines = [answering[1].stderr.readline().decode() for _ in range(2)]
    assert lines[1] == "lean: interrupted\n"  # after the start-up line; freeing torch's modules takes a second more
    assert time.monotonic() - sent < 2
    assert answering[1].stderr.read() == b""
    assert answering[1].wait(timeout=30) == 130


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("delay", [0.0, 0.2, 1.0, 2.0, 3.5])
def test_both_signals_end_the_command_within_two_seconds_while_it_loads(model, name, delay):
    """From the moment at which Python has come to lean: while it imports lean, torch and transformers, and loads."""
    script = "import sys; from lean.__main__ import main; print('at main', flush=True); main()"
    command = (sys.executable, "-c", script, "run", model, "hi", "--max-tokens", "500", "--ignore-eos")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, preexec_fn=as_in_a_shell())
    assert process.stdout.readline() == b"at main\n"
    time.sleep(delay + 0.05)
    if process.poll() is not None:
        pytest.skip("the command was quicker")
    process.send_signal(getattr(signal, name))
    sent = time.monotonic()
    err = process.communicate(timeout=30)[1].decode()
    assert time.monotonic() - sent < 2.5
    assert process.returncode == 130
    assert err.endswith("lean: interrupted\n")
    assert "Traceback" not in err
