"""Signals end the command in time, and only where they should."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

PREAMBLE = """
    import os, signal, sys, time
    from lean.cli.signals import deferred_interrupt, interruptible, own_interrupt
"""


def run(script: str) -> subprocess.CompletedProcess:
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, **heed)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_long_call_of_a_library_does_not_hold_the_process(name):
    """Python's handlers run between its own instructions only, and this key derivation is one."""
    started = time.monotonic()
    ended = run(
        f"""
        import hashlib, threading
        with interruptible():
            threading.Timer(0.5, os.kill, (os.getpid(), signal.{name})).start()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
        """
    )
    assert (ended.returncode, ended.stderr) == (130, "lean: interrupted\n")
    assert time.monotonic() - started < 8  # with the start of Python


def test_an_interrupt_that_somebody_waits_for_does_not_end_the_process():
    ended = run(
        """
        with interruptible():
            try:
                with own_interrupt():
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(1)
            except KeyboardInterrupt:
                print("heeded")
            time.sleep(2.5)
            with deferred_interrupt() as stop:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
                print("stop", stop.is_set())
                time.sleep(2.5)
            print("alive")
        """
    )
    assert (ended.returncode, ended.stdout) == (0, "heeded\nstop True\nalive\n")


def test_the_second_interrupt_is_not_deferred_and_elsewhere_it_ends_the_process():
    ended = run(
        """
        with interruptible():
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
    assert (ended.returncode, ended.stdout) == (130, "second\n")
