# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention run`: ranks of this machine, which end in one sentence and in time."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import tree_attention
from distributed import AMPLE_SECONDS
from tiers import tiers
from tree_attention.__main__ import main
from tree_attention.cli import run
from tree_attention.cli.rank import LAUNCHER

PACKAGE = str(Path(tree_attention.__file__).parents[1])
PROGRAM = """
import atexit, json, os, signal, sys, time

rank, what = int(os.environ["RANK"]), sys.argv[1]
if what == "show":
    names = "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    names += "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_RUN_ID"
    shown = {name: os.environ.get(name) for name in names}
    shown |= {"argv": sys.argv, "path": sys.path[0], "stdin": sys.stdin.read(), "rank": rank}
    print(json.dumps(shown) + "\\n", end="", flush=True)
elif what == "wait":
    print("ready\\n", end="", flush=True)
    time.sleep(1000)
elif what == "interrupted twice":
    @atexit.register
    def leave():
        os.kill(os.getpid(), signal.SIGINT)
        print("left\\n", end="", flush=True)

    print("ready\\n", end="", flush=True)
    time.sleep(1000)
elif what == "deaf":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print("ready\\n", end="", flush=True)
    time.sleep(1000)
elif what == "killed at a bar":  # of progress, which has no cursor
    print("\\x1b[?25l", end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
elif rank == 0:
    if what == "all fail":
        time.sleep(0.5)
        raise RuntimeError("rank 1 is lost")
    time.sleep(1000)
elif what in ("fail", "all fail"):
    raise ValueError("no such sky")
elif what == "of several lines":
    raise ValueError("no such sky\\nframe #0")
elif what == "exit":
    sys.exit(3)
elif what == "words":
    sys.exit("no room for 3 keys")
elif what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "of no name":
    os.kill(os.getpid(), 40)
elif what == "recorded":
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def fail():
        raise ValueError("no such sky")

    fail()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tree_attention", "run", *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    names = ("RANK", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"PYTHONPATH": PACKAGE} | variables


def ended(*arguments: object, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments),
        env=environment(**variables),
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=AMPLE_SECONDS,
    )


def shown(*arguments: object, **variables: str) -> list[dict[str, object]]:
    done = ended(*arguments, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(map(json.loads, done.stdout.splitlines()), key=lambda x: x["rank"])


def test_what_ranks_are_given(program: Path) -> None:
    first, second = shown("-n", 2, program, "show", "-n", "3", TORCHELASTIC_RUN_ID="above")
    assert (first.pop("rank"), second.pop("rank")) == (0, 1)
    assert (first.pop("LOCAL_RANK"), second.pop("LOCAL_RANK")) == ("0", "1")
    # One of them reads what is typed.
    assert (first.pop("stdin"), second.pop("stdin")) == ("typed\n", "")
    assert first == second
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert (first["MASTER_ADDR"], first["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    assert first["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert first["argv"] == [str(program), "show", "-n", "3"]
    assert first["path"] == str(program.parent) and first["TORCHELASTIC_RUN_ID"] is None


def test_what_the_user_has_set_stays(program: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    given = {"OMP_NUM_THREADS": "3", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "net0"}
    (alone,) = shown("-n", 1, program, "show", **given)
    assert {name: alone[name] for name in given} == given


def test_a_module(program: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command("-n", 1, "-m", "program", "show"),
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=AMPLE_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(json.loads(done.stdout)["path"]) == tmp_path


def test_a_module_that_is_not_there() -> None:
    """Its package is looked for by `runpy`, whose own error has a cause."""
    done = ended("-n", 1, "-m", "no_such.module")
    assert done.returncode == 1 and "No module named 'no_such'" in done.stderr
    assert done.stderr.startswith("run: rank 0 of 1: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("what", "status", "last"),
    tiers(
        [
            ("fail", 1, "rank 1 of 2: ValueError: no such sky"),
        ],
        [
            ("exit", 3, "rank 1 of 2 ended with exit status 3"),
            ("killed", 137, "rank 1 of 2 was ended by SIGKILL, as the system does where memory ru"),
            ("all fail", 1, "rank 1 of 2: ValueError: no such sky"),
            ("of several lines", 1, "rank 1 of 2: ValueError: no such sky"),
            ("words", 1, "rank 1 of 2: no room for 3 keys"),
            ("of no name", 168, "rank 1 of 2 was ended by signal 40"),
        ],
    ),
)
def test_the_first_error_is_the_last_sentence(
    program: Path, what: str, status: int, last: str
) -> None:
    """The other rank would go on for a quarter of an hour."""
    done = ended("-n", 2, program, what)
    assert done.returncode == status and done.stdout == ""
    *before, sentence = done.stderr.splitlines()
    assert sentence.startswith(f"run: {last}")
    if "ValueError" not in last:
        assert before == []
    else:
        assert before[0] == "Traceback (most recent call last):" and "program.py" in before[1]
        assert done.stderr.count("Traceback") == 1 and "lost" not in done.stderr
        # Once, where it is one line.
        assert done.stderr.count("no such sky") == 2 + (what == "of several lines")


@pytest.mark.deep
def test_what_the_record_of_torch_has_written(program: Path) -> None:
    """It has said why before the error is seen."""
    done = ended("-n", 2, program, "recorded")
    last = "run: rank 1 of 2: ValueError: no such sky"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, last)


def waiting(size: int, program: Path, what: str = "wait") -> subprocess.Popen[str]:
    """A launcher whose ranks wait until they are ended."""
    return subprocess.Popen(
        command("-n", size, program, what),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", tiers([signal.SIGTERM], [signal.SIGINT, signal.SIGHUP]))
def test_signals_go_on_to_the_ranks(program: Path, number: signal.Signals) -> None:
    with waiting(2, program) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        launcher.send_signal(number)
        # Which end when no rank has them any more.
        assert (launcher.stdout.read(), launcher.stderr.read()) == ("", "")
        assert launcher.wait(AMPLE_SECONDS) == 128 + number


@pytest.mark.deep
def test_a_second_interrupt_leaves_exit_functions_alone(program: Path) -> None:
    """As from a process that sends SIGINT to the group, which the launcher passes on as well."""
    with waiting(1, program, "interrupted twice") as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGINT)
        assert (launcher.stdout.read(), launcher.stderr.read()) == ("left\n", "")
        assert launcher.wait(AMPLE_SECONDS) == 130


@pytest.mark.deep
def test_a_launcher_that_was_stopped_goes_on(program: Path) -> None:
    """As by Ctrl-Z and fg: a wait that lasted longer than it should have has brought no signal."""
    with waiting(1, program) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert launcher.stdout.readline() == "ready\n"
        for _ in range(2):
            time.sleep(0.2)  # it waits
            launcher.send_signal(signal.SIGSTOP)
            time.sleep(1)
            launcher.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGTERM)
        assert (launcher.stdout.read(), launcher.stderr.read()) == ("", "")
        assert launcher.wait(AMPLE_SECONDS) == 128 + signal.SIGTERM


def test_ranks_end_with_a_launcher_that_is_killed(program: Path) -> None:
    with subprocess.Popen(
        command("-n", 2, program, "wait"), env=environment(), stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        launcher.kill()
        assert launcher.stdout.read() == ""


def on_a_terminal(words: list[str]) -> tuple[int, int]:
    """A process, and the terminal that it is on."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, words, environment())
    return pid, terminal


def read_until(terminal: int, is_enough: object) -> bytes:
    text = b""
    while not (callable(is_enough) and is_enough(text)):
        try:
            if not (read := os.read(terminal, 4096)):
                break
        except OSError:  # nobody has it any more
            break
        text += read
    return text


def test_ctrl_c_is_silent(program: Path) -> None:
    pid, terminal = on_a_terminal(command("-n", 2, program, "wait"))
    read_until(terminal, lambda text: text.count(b"ready") == 2)
    os.write(terminal, b"\x03")
    assert read_until(terminal, None) in (b"^C", b"\r\n^C")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(terminal)


def test_a_rank_that_is_killed_leaves_a_cursor(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    pid, terminal = on_a_terminal(command("-n", 1, program, "killed at a bar"))
    text = read_until(terminal, None)
    assert text.rfind(b"\x1b[?25h") > text.rfind(b"\x1b[?25l") >= 0
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 137
    os.close(terminal)


def test_no_cursor_is_shown_where_there_is_no_terminal(program: Path) -> None:
    """Also where a variable has rich colour what is written into a file."""
    done = ended("-n", 1, program, "killed at a bar", FORCE_COLOR="1", TERM="xterm")
    assert done.returncode == 137
    assert "\x1b[?25l" in done.stdout and "\x1b[?25h" not in done.stdout + done.stderr


INTERRUPTED = """
import sys
from tree_attention import __main__ as program
from tree_attention.cli import info

def begin(arguments):
    print("\\x1b[?25l", end="", flush=True)
    raise KeyboardInterrupt

if sys.argv[1] == "command":
    info.main = begin
else:
    program.main = begin
sys.argv[1:] = ["info"]
program.console()
"""


@pytest.mark.parametrize(
    ("when", "said"), [("command", b"info: interrupted; all ranks end"), ("before", b"")]
)
def test_an_interrupt_leaves_a_cursor(
    when: str, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes while a bar of progress begins, which then never ends."""
    monkeypatch.setenv("TERM", "xterm")
    pid, terminal = on_a_terminal([sys.executable, "-c", INTERRUPTED, when])
    text = read_until(terminal, None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert text.rfind(b"\x1b[?25h") > text.rfind(b"\x1b[?25l") >= 0
    assert said in text and b"Traceback" not in text
    os.close(terminal)


@pytest.mark.deep
def test_ranks_that_are_deaf_are_ended(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C ends them at once; the first waits for what they may be saving."""
    pid, terminal = on_a_terminal(command("-n", 2, program, "deaf"))
    read_until(terminal, lambda text: text.count(b"ready") == 2)
    os.write(terminal, b"\x03")
    time.sleep(0.3)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.write(terminal, b"\x03")
    assert set(read_until(terminal, None).replace(b"\x1b[?25h", b"")) <= set(b"^C\r\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(terminal)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "0"}, "RANK is set, as torchrun and run set it for the ranks that they start"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS must be an integer from 1 to .*'many'"),
        ({"MASTER_PORT": "tcp://1.2.3.4:5"}, "MASTER_PORT must be an integer from 0 to 65535, got"),
        ({"MASTER_ADDR": "192.0.2.1"}, "MASTER_ADDR must be unset, or an address of this machine"),
        ({"MASTER_ADDR": "no.invalid"}, "MASTER_ADDR must be unset, or an address of this machine"),
    ],
)
def test_an_environment_that_is_in_the_way(
    variables: dict[str, str],
    sentence: str,
    program: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "-n", "2", str(program), "show"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"run: {sentence}", error) and error.count("\n") == 1


def test_a_port_in_use(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        assert main(["run", "-n", "2", str(program), "show"]) == 2
    said = f"run: MASTER_PORT must be unset, or a free port of this machine, got '{port}': Address"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-n", "0", "x.py"], "run: -n must be 1 to 1,024 ranks of this machine, got 0"),
        (["-n", "2", "/no.py"], "run: /no.py: there is no such file; name a Python program, or"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_a_command_says_why_once() -> None:
    """And not on each of the ranks."""
    done = ended("-n", 2, "-m", "tree_attention", "generate", "--model", "/no", "--prompt", "a")
    assert done.returncode == 2 and done.stderr.startswith("run: generate: no checkpoint in /no: ")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_rank_is_told_by_who_has_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that a rank starts says for itself what is wrong."""
    for launcher, is_ours in ((os.getppid(), True), (os.getpid(), False)):
        monkeypatch.setenv(LAUNCHER, str(launcher))
        assert run.rank_program.is_launched() == is_ours


def test_the_sentence_is_in_the_file_of_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as torchrun does for its summary."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert main(["generate", "--model", "/no", "--prompt", "a"]) == 2
    said = capsys.readouterr().err
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert failure.message["message"] == failure.message["extraInfo"]["py_callstack"] == said[:-1]
    assert abs(failure.timestamp - time.time()) < AMPLE_SECONDS


@pytest.mark.deep
def test_the_sentence_is_in_the_summary_of_torchrun() -> None:
    """Where it printed "To enable traceback see ..."."""
    launcher = "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    command = "tree_attention", "generate", "--model", "/no", "--prompt", "a"
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", *command],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=AMPLE_SECONDS,
    )
    assert done.returncode == 1
    summary = done.stderr.partition("Root Cause (first observed failure)")[2]
    assert "traceback : generate: no checkpoint in /no: --model takes a directory" in summary
