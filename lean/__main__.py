"""The command ``lean``, also as ``python -m lean``. Little is imported before signals and streams are in order."""

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Run the command that the arguments name, and end the process with its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    from lean.cli.ending import run_to_end
    from lean.cli.signals import leave, stand_guard
    from lean.cli.streams import guard_streams

    guard_streams()
    stand_guard()
    leave(run_to_end(_command))


def _command() -> object:
    from lean.cli.main import run_command
    from lean.cli.signals import expect_interrupts

    expect_interrupts()
    return run_command()


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    """Until the guard stands there is nothing to tidy up."""
    os.write(2, b"lean: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
