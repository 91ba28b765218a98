"""However the streams of a process are: the answer comes out whole, or the command ends as the README says."""

import os
import subprocess
import sys
import textwrap

import pytest
from streams import GONE, KINDS, lean

pytestmark = pytest.mark.usefixtures("environment", "home")

ANSWERS = [("--help",), ("run", "--print-config")]


@pytest.mark.parametrize("command", ANSWERS, ids=" ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_takes_nothing_ends_the_command(command, kind):
    """A reader that left is no fault. Anything else is, and one line says so."""
    code, _, err = lean(*command, stdout=kind)
    if kind in GONE:
        assert (code, err) == (0, "")
    else:
        assert code == 1
        assert err.startswith("lean: cannot write to standard output: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_output_that_takes_nothing_does_not_stop_the_answer(kind):
    assert lean("models", "--json", stderr=kind) == (0, '{"models": []}\n', "")


def test_all_three_streams_closed_leave_the_exit_codes_as_they_are():
    closed = {"stdin": "closed", "stdout": "closed", "stderr": "closed"}
    assert lean("rm", "nothing", **closed)[0] == 2
    assert lean("models", **closed)[0] == 1


def test_a_closed_standard_input_is_an_empty_one(model):
    code, out, err = lean("run", model, stdin="closed")
    assert (code, out) == (2, "")
    assert "the prompt is empty" in err


def python(script: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, **options
    )


def test_a_file_that_is_opened_never_takes_the_place_of_a_closed_stream(tmp_path):
    ended = python(
        f"""
        import sys
        from lean.cli.streams import OutputLost, guard_streams
        guard_streams()
        with open({str(tmp_path / "file")!r}, "w") as file:
            print(file.fileno() > 2, file=file, flush=True)
            print("an error", file=sys.stderr)
            try:
                print("an answer", flush=True)
            except OutputLost as error:
                print("lost", error.gone, file=file)
        """,
        preexec_fn=lambda: [os.close(descriptor) for descriptor in range(3)],
    )
    assert ended.returncode == 0
    assert (tmp_path / "file").read_text() == "True\nlost False\n"


def test_a_lost_output_is_reported_once_and_takes_everything_afterwards():
    """So that nothing fails while the command ends."""
    ended = python(
        """
        import sys
        from lean.cli.streams import OutputLost, guard_streams
        guard_streams()
        try:
            print("x" * 100_000, flush=True)
        except OutputLost as error:
            print(error, file=sys.stderr)
        print("more", flush=True)
        """,
        preexec_fn=lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1),
    )
    assert (ended.returncode, ended.stderr) == (0, "cannot write to standard output: No space left on device\n")


def test_text_beyond_the_encoding_of_a_stream_does_not_crash():
    ended = python(
        """
        import sys
        from lean.cli.streams import guard_streams
        guard_streams()
        print("h\u00e9llo")
        print("h\u00e9llo", file=sys.stderr)
        sys.stdout.flush()
        """,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "h?llo\n", "h?llo\n")


def test_an_output_that_does_not_block_is_waited_for():
    """A slow reader of a pipe that another program made non-blocking."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    script = "from lean.cli.streams import guard_streams\nguard_streams()\nprint('x' * 300_000, flush=True)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=writer)
    os.close(writer)
    with open(reader, "rb") as file:
        assert len(file.read()) == 300_001
    assert process.wait(timeout=30) == 0
