"""Signals end the command in time, and only where they should."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from streams import as_in_a_shell

PREAMBLE = """
    import os, signal, sys, time
    from lean.cli.signals import INTERRUPTED, deferred_interrupt, expect_interrupts, leave, own_interrupt, stand_guard
    stand_guard()
    expect_interrupts()
"""
LONG_CALLS = {
    "without the interpreter's lock": "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
    "with the interpreter's lock": "sum(range(10**11))",
}


def start(script: str) -> subprocess.Popen:
    code = textwrap.dedent(PREAMBLE) + "print('started', flush=True)\n" + textwrap.dedent(script)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # In a session of its own: a script that signals its process group must not end the tests.
    # From Python 3.12 on a fork beside threads is warned of; the scripts that fork end at once, or run no other thread.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", code]
    process = subprocess.Popen(command, preexec_fn=as_in_a_shell(), start_new_session=True, **pipes)
    # Byte by byte: a buffered reader may take later lines too, and `communicate` does not return those.
    assert b"".join(os.read(process.stdout.fileno(), 1) for _ in "started\n") == b"started\n"
    return process


def run(script: str) -> tuple[int, str, str]:
    process = start(script)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("call", LONG_CALLS.values(), ids=LONG_CALLS)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_long_call_of_a_library_does_not_hold_the_process(name, call):
    process = start(call)
    time.sleep(0.3)
    process.send_signal(getattr(signal, name))
    sent = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "lean: interrupted\n")
    assert time.monotonic() - sent < 3


def test_a_process_that_takes_no_order_is_killed():
    """Where the C library cannot read the order, and Python's lock is held."""
    script = f"""
        import lean.cli.watcher as watcher
        pid = os.fork()
        if not pid:
            {LONG_CALLS["with the interpreter's lock"]}
        news, sender = os.pipe()
        os.write(sender, bytes([signal.SIGTERM]))
        watcher.ORDER_S, watcher.KILL_S = 0.1, 0.2
        watcher._wait(news, order=lambda: None, kill=lambda: os.kill(pid, signal.SIGKILL))
        print(os.waitpid(pid, 0)[1])
        leave(0)
    """
    assert run(script) == (0, "9\n", "lean: interrupted\n")


def test_an_interrupt_that_a_library_swallows_or_renames_still_ends_the_command():
    code, _, err = run(
        """
        from lean.cli.ending import run_to_end
        def command():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            except KeyboardInterrupt:
                raise ImportError("numpy failed to import")
        leave(run_to_end(command))
        """
    )
    assert (code, err) == (130, "lean: interrupted\n")


def test_an_interrupt_in_a_place_without_a_caller_is_raised_again_elsewhere():
    code, out, err = run(
        """
        import weakref
        class Thing: pass
        thing = Thing()
        reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
        try:
            del thing
            time.sleep(1)
        except KeyboardInterrupt:
            print("raised", flush=True)
        leave(INTERRUPTED)
        """
    )
    assert (code, out, err) == (130, "raised\n", "lean: interrupted\n")


def test_an_interrupt_that_somebody_waits_for_does_not_end_the_process():
    code, out, _ = run(
        """
        try:
            with own_interrupt():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
        except KeyboardInterrupt:
            print("heeded")
        time.sleep(1.8)
        with deferred_interrupt() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            print("stop", stop.wanted)
            time.sleep(1.8)
        print("alive")
        leave(0)
        """
    )
    assert (code, out) == (0, "heeded\nstop True\nalive\n")


def test_the_second_interrupt_is_not_deferred_and_elsewhere_it_ends_the_process():
    code, out, _ = run(
        """
        try:
            with deferred_interrupt():
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
        except KeyboardInterrupt:
            print("second", flush=True)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            time.sleep(60)
        """
    )
    assert (code, out) == (130, "second\n")


@pytest.mark.parametrize("pause", [0, 0.05])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_a_forked_process_ends_it_and_not_its_parent(name, pause):
    """Without a pause the signal arrives while the process is forked."""
    code, out, _ = run(
        f"""
        for _ in range(20):
            pid = os.fork()
            if not pid:
                time.sleep(5)
                os._exit(1)
            time.sleep({pause})
            os.kill(pid, signal.{name})
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.{name}
        time.sleep(1.8)
        print("alive")
        leave(0)
        """
    )
    assert (code, out) == (0, "alive\n")


def test_a_signal_that_arrives_before_a_fork_still_ends_the_command():
    code, _, err = run(
        """
        os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGTERM))
        if not os.fork():
            time.sleep(2)
            os._exit(1)
        time.sleep(60)
        """
    )
    assert (code, err) == (130, "lean: interrupted\n")


@pytest.mark.parametrize("end", ["leave(0)", "leave(INTERRUPTED)"])
def test_no_second_process_stays(end):
    process = start(f"print(open(f'/proc/self/task/{{os.getpid()}}/children').read(), flush=True); {end}")
    child = int(process.stdout.readline())
    process.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
