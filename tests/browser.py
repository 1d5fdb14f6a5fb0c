# SPDX-License-Identifier: BSD-3-Clause
"""A page in a headless Chromium, where there is one."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not BROWSER, reason="no browser (Debian: apt install chromium)")


def console_of(
    url: str, milliseconds: int = 30_000, flags: Iterable[str] = ()
) -> tuple[str, list[str]]:
    """Return the elements of a page after so much time of its own, and what its console says."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND"]  # a page that needs a network fails
    command += [f"--virtual-time-budget={milliseconds}", "--dump-dom", *flags, url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return run.stdout, re.findall(r"CONSOLE[^\"]*\"(.*)\", source", run.stderr)


def on_a_phone(page: Path, script: str, folder: Path, width: int = 390) -> Any:
    """Return the value of an expression in a page that is so many pixels wide."""
    outer = folder / "phone.html"  # a window has at least 500 pixels, a frame has not
    outer.write_text(f"""
      <iframe src="{page.as_uri()}" style="width:{width}px;height:900px;border:0"></iframe>
      <pre></pre>
      <script>
        const measure = () => {{
          const inside = document.querySelector("iframe").contentWindow;
          const found = inside.Function({json.dumps("return " + script)})();
          document.querySelector("pre").textContent = JSON.stringify(found);
        }};
        onload = () => setTimeout(measure, 2000);
      </script>""")
    dom, errors = console_of(outer.as_uri(), flags=("--allow-file-access-from-files",))
    assert not errors
    return json.loads(unescape(re.search(r"<pre>(.*)</pre>", dom, re.DOTALL)[1]))
