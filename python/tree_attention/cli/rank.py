# SPDX-License-Identifier: BSD-3-Clause
"""The process of one rank, and how it says why it ends.

`launch` of run.py starts this file by its path, so that nothing comes before it which Ctrl-C or an
error could end in a traceback. An error goes into the file that TORCHELASTIC_ERROR_FILE names, in
the form of torch's `record`, from where a launcher has it.
"""

import atexit
import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from typing import NoReturn

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # which torchrun gives each rank too
LAUNCHER = "TREE_ATTENTION_LAUNCHER"  # the process id of `launch`
# What the launcher waits for, and has blocked where it starts this.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
# What a shell reports for a process that Ctrl-C ended: 128 and the number of SIGINT.
INTERRUPTED_STATUS = 130
_PR_SET_PDEATHSIG = 1


def is_launched() -> bool:
    """True in a rank of `launch`, which prints its error."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def record_error(sentence: str, traced: str = "") -> bool:
    """Writes why this rank ends where its launcher reads it, with the traceback, if any. True if it
    could be written."""
    file = os.environ.get(ERROR_FILE)
    if not file:
        return False
    now = time.time()
    # torch shows the traceback, and reads the timestamp by int().
    details = {"py_callstack": traced or sentence, "timestamp": str(int(now))}
    # These two entries mark a file of this library: torch's `record` writes neither.
    details |= {"is_traceback": str(bool(traced)), "time": str(now)}
    try:
        with open(file, "w", encoding="utf-8") as out:
            json.dump({"message": {"message": sentence, "extraInfo": details}}, out)
    except OSError:
        return False
    return True


def main(words: list[str]) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _end_with_launcher()
        _run(words)
    except KeyboardInterrupt:
        _leave(INTERRUPTED_STATUS)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            raise
        if not record_error(_named(str(leaving.code))):
            raise
        _leave(1)
    except BaseException as error:
        lines = _traced(error).rstrip().split("\n")
        last = f"{type(error).__name__}: {error}".rstrip(": ")
        sentence, *more = last.splitlines()
        # Said once, where it is the whole of the error.
        traced = "\n".join(lines if more or lines[-1] != last else lines[:-1])
        if not record_error(_named(sentence), traced):
            raise
        _leave(1)


def _run(words: list[str]) -> None:
    """Runs the program as `python WORDS` would."""
    is_module = words[0] == "-m"
    program, *arguments = words[is_module:]
    if not getattr(sys.flags, "safe_path", False):  # then Python adds no folder
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(program))
    sys.argv = [program, *arguments]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _end_with_launcher() -> None:
    """Ends this rank where its launcher is killed, and cannot tell it to end."""
    with suppress(AttributeError):  # where it is not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if not is_launched():  # it was killed before that
            os._exit(1)


def _named(text: str) -> str:
    return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {text}"


def _traced(error: BaseException) -> str:
    """The traceback from the program on."""
    trace = error.__traceback__
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    # Where the program did not begin, as with a wrong name of a module, the cause is in runpy too.
    began = trace is not None
    return "".join(traceback.format_exception(type(error), error, trace, chain=began))


def _leave(status: int) -> NoReturn:
    """Ends as Python does, but waits for no thread: one that waits in C++ for a lost rank would end
    in a SIGABRT."""
    # A second one, as a signal to the whole process group brings, would end the exit functions in a
    # traceback; `launch` kills the ranks for somebody who does not want to wait.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
