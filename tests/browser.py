# SPDX-License-Identifier: BSD-3-Clause
"""A page in a headless Chromium, where there is one."""

import re
import shutil
import subprocess

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not BROWSER, reason="no browser (Debian: apt install chromium)")


def console_of(url: str, milliseconds: int = 30_000) -> tuple[str, list[str]]:
    """Return the elements of a page after so much time of its own, and what its console says."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND"]  # a page that needs a network fails
    command += [f"--virtual-time-budget={milliseconds}", "--dump-dom", url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return run.stdout, re.findall(r"CONSOLE[^\"]*\"(.*)\", source", run.stderr)
