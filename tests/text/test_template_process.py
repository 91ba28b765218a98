"""The process that renders templates: how it starts, how it ends, and what it shares with others."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from chat_templates import CHATML, said, tokenizer_of
from helpers import refusal

from lean.errors import RequestError
from lean.text import template_process
from lean.text.prompt import encode_chat
from lean.text.template import template_of
from lean.text.template_process import RENDERER, Renderer

SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ONE = {"messages": said("a")}


def render(renderer, template="<{{ messages[0].content }}>"):
    return renderer.render("the chat template", template, ONE, 1)


@pytest.fixture
def renderer():
    made = Renderer()
    yield made
    made.stop()


def pid_of(renderer):
    process = renderer._process
    return None if process is None else process.pid


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:  # it ended between opening and reading
        return False
    except FileNotFoundError:  # it ended just now, or the system has no /proc
        return not Path("/proc/self/stat").exists()


def ended_by(pid, number):
    """Send a signal to a process. True when the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    return not is_running(pid)


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_one_process_serves_all_renderings(renderer):
    render(renderer)
    pid = renderer._process.pid
    for _ in range(5):
        assert render(renderer) == "<a>"
    assert renderer._process.pid == pid


def test_nothing_is_started_before_the_first_rendering():
    code = "import lean.text.prompt as p; print(p.has_template(None), end=''); import lean.text.template_process as t;"
    code += "import sys; print(t.RENDERER._process, 'jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "FalseNone False\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_was_killed_between_renderings_is_replaced(renderer, number):
    render(renderer)
    pid = renderer._process.pid
    os.kill(pid, number)
    assert render(renderer) == "<a>"
    assert renderer._process.pid != pid
    assert not is_running(pid)


@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, 2), (signal.SIGTERM, 2), (signal.SIGSEGV, 1)])
def test_a_rendering_whose_process_is_killed_is_tried_once_more_but_not_after_a_crash(
    renderer, number, times, monkeypatch
):
    monkeypatch.setattr(template_process, "CPU_SECONDS", 60)
    monkeypatch.setattr(template_process, "WALL_SECONDS", 60)
    errors, asked, send = [], [], renderer._send

    def slow():
        try:
            render(renderer, SLOW)
        except RequestError as error:
            errors.append(str(error))

    def send_and_tell(*args):  # a process that ends before it is asked is replaced without a word
        send(*args)
        asked.append(pid_of(renderer))

    render(renderer)
    monkeypatch.setattr(renderer, "_send", send_and_tell)
    thread = threading.Thread(target=slow)
    thread.start()
    for time_ in range(times):
        assert until(lambda time_=time_: len(asked) > time_)
        assert until(lambda time_=time_: ended_by(asked[time_], number))
    thread.join()
    assert errors == [f"the chat template ended the process that renders it ({number.name})"]
    assert render(renderer) == "<a>"


def test_the_end_of_the_process_is_seen_while_another_process_holds_its_socket(renderer, monkeypatch):
    held = []

    def popen(*args, stdin, **kwargs):
        held.append(os.dup(stdin))  # as a process does that another thread forks in this moment
        return started(*args, stdin=stdin, **kwargs)

    started = subprocess.Popen
    monkeypatch.setattr(template_process.subprocess, "Popen", popen)
    monkeypatch.setattr(template_process, "WALL_SECONDS", 60)
    begin = time.monotonic()
    assert "needed more than 2 s of processor time" in refusal(render, renderer, SLOW)
    assert time.monotonic() - begin < 30
    for one in held:
        os.close(one)


def test_a_rendering_whose_process_is_killed_once_is_rendered(renderer, monkeypatch):
    receive, killed = renderer._receive, []

    def kill_first(most, deadline):
        if renderer._ready and not killed:
            killed.append(renderer._process.pid)
            os.kill(renderer._process.pid, signal.SIGKILL)
            renderer._process.wait()
            raise EOFError
        return receive(most, deadline)

    monkeypatch.setattr(renderer, "_receive", kill_first)
    assert render(renderer) == "<a>"
    assert len(killed) == 1


def test_an_interrupt_in_the_middle_of_a_rendering_leaves_no_half_reply(renderer, monkeypatch):
    def interrupted(most, deadline):
        raise KeyboardInterrupt

    render(renderer)
    with monkeypatch.context() as patch:
        patch.setattr(renderer, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render(renderer, "late")
    assert render(renderer) == "<a>"


def test_threads_may_render_at_the_same_time(renderer):
    def one(number):
        return renderer.render("", "{{ n }}" * 50, {"n": number}, 1)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(100))) == [str(number) * 50 for number in range(100)]


def test_a_fork_renders_in_a_process_of_its_own():
    tokenizer = tokenizer_of(CHATML)
    before = template_of(tokenizer).render(said("a"))
    pid = RENDERER._process.pid
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fresh = RENDERER._process is None
            code = 0 if fresh and template_of(tokenizer).render(said("a")) == before else 2
            RENDERER.stop()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert RENDERER._process.pid == pid
    assert template_of(tokenizer).render(said("a")) == before


def test_other_processes_inherit_no_file_of_it(renderer):
    render(renderer)
    assert not os.get_inheritable(renderer._socket.fileno())
    assert renderer._socket.fileno() > 2


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_process_has_no_file_and_no_environment_of_its_parent(renderer, monkeypatch, tmp_path):
    monkeypatch.setenv("LEAN_SECRET", "x")
    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        render(renderer)
        held = {os.readlink(path) for path in Path(f"/proc/{renderer._process.pid}/fd").iterdir()}
    assert all(one.startswith("socket:") or one == "/dev/null" for one in held)
    assert b"LEAN_SECRET" not in Path(f"/proc/{renderer._process.pid}/environ").read_bytes()


def test_the_process_is_in_another_session_so_that_ctrl_c_does_not_reach_it(renderer):
    render(renderer)
    assert os.getsid(renderer._process.pid) == renderer._process.pid != os.getsid(0)


def test_the_process_imports_neither_torch_nor_transformers(renderer):
    """Its limit of memory is small, and it starts in the blink of an eye."""
    render(renderer)
    if Path("/proc/self/maps").exists():
        maps = Path(f"/proc/{renderer._process.pid}/maps").read_text()
        assert "jinja2" in maps or "python" in maps
        assert "/torch/" not in maps
        assert "/numpy/" not in maps
    command = renderer._process.args
    assert {"-I", "-S"} <= set(command)


RENDER_AND = """
import os, signal, sys
from lean.text.template_process import RENDERER
RENDERER.render('', '{{ a }}', {'a': 1}, 1)
print(RENDERER._process.pid, flush=True)
"""


@pytest.mark.parametrize("end", ["", "os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)", "raise KeyboardInterrupt"])
def test_the_process_ends_with_its_parent_and_prints_nothing(end):
    done = subprocess.run([sys.executable, "-c", RENDER_AND + end], capture_output=True, text=True)
    assert until(lambda: not is_running(int(done.stdout)))
    assert done.stderr == "" or end == "raise KeyboardInterrupt"


def test_the_process_ends_with_its_parent_though_a_fork_of_the_parent_lives_on():
    code = RENDER_AND + "import time\nif os.fork() == 0:\n    os.close(1)\n    os.close(2)\n    time.sleep(60)\nelse:\n"
    code += "    os._exit(0)"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    pid = int(done.stdout.read())
    try:
        assert until(lambda: not is_running(pid))
    finally:
        os.killpg(done.pid, signal.SIGKILL)
        done.wait()
        done.stdout.close()


def test_closed_standard_streams_do_not_disturb_it():
    code = "import os\nfor n in (0, 1, 2): os.close(n)\n" + RENDER_AND.replace("print(", "str(").replace(
        ", flush=True", ""
    )
    code += "os.write(2, b'x') if os.path.exists('/proc/self/fd/2') else None\n"
    code += "os._exit(0 if RENDERER.render('', '{{ a }}', {'a': 1}, 1) == '1' else 4)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BlockingIOError(11, "Resource temporarily unavailable"), "temporarily"),
        (OSError(24, "Too many open"), "Too many"),
    ],
)
def test_where_no_process_can_be_started_the_error_is_one_line(error, reason, monkeypatch):
    def fail(*arguments, **options):
        raise error

    RENDERER.stop()
    monkeypatch.setattr(template_process.subprocess, "Popen", fail)
    message = refusal(encode_chat, tokenizer_of(CHATML + " "), said("a"))
    assert message.startswith("cannot start the process that renders chat templates: ")
    assert reason in message


def test_a_python_that_cannot_run_is_reported(monkeypatch):
    RENDERER.stop()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "ended while it started" in refusal(encode_chat, tokenizer_of(CHATML + "  "), said("a"))
    monkeypatch.setattr(sys, "executable", "")
    assert "cannot start" in refusal(encode_chat, tokenizer_of(CHATML + "  "), said("a"))


def test_an_old_jinja2_is_refused_as_its_sandbox_has_holes(monkeypatch):
    RENDERER.stop()
    monkeypatch.setattr(template_process, "version", lambda name: "3.1.4")
    assert "need jinja2 3.1.6 or newer, found 3.1.4" in refusal(encode_chat, tokenizer_of(CHATML + "   "), said("a"))
