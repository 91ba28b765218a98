"""Signals and a closed pipe end the command in time and without a traceback."""

import signal
import subprocess
import sys
import threading
import time

import pytest

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def answering(tiny):
    """Two commands amid a long answer, five bytes of which were read."""
    folder = str(tiny("llama", max_position_embeddings=20_000))
    command = (sys.executable, "-m", "lean", "run", folder, "hi", "--max-tokens", "19000", "--ignore-eos")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Background jobs of a shell ignore SIGINT, and children inherit that.
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    processes = [subprocess.Popen(command, **pipes, **heed) for _ in range(2)]
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
    assert answering[0].wait(timeout=30) != 0
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
@pytest.mark.parametrize("delay", [0.3, 1.5, 3.0])
def test_both_signals_end_the_command_within_two_seconds_while_it_loads(model, name, delay):
    command = (sys.executable, "-m", "lean", "run", model, "hi", "--max-tokens", "500", "--ignore-eos")
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **heed
    )
    time.sleep(delay)
    if process.poll() is not None:
        pytest.skip("the command was quicker")
    process.send_signal(getattr(signal, name))
    sent = time.monotonic()
    err = process.communicate(timeout=30)[1].decode()
    assert time.monotonic() - sent < 2.5
    if delay > 1:  # earlier, Python itself may not have come to lean yet
        assert process.returncode == 130
        assert err.endswith("lean: interrupted\n")
        assert "Traceback" not in err
