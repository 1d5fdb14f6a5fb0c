# SPDX-License-Identifier: BSD-3-Clause
"""The page of a plan is one file that fetches nothing, and a browser shows its plots."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tree_attention.planning import tables
from tree_attention.planning.arithmetic import Work
from tree_attention.planning.machines import LINKS, MACHINES, Hosts
from tree_attention.planning.models import NAMED, llama
from tree_attention.planning.page import page
from tree_attention.planning.plans import Plan, verdicts

HOSTS = Hosts(MACHINES["h200"], LINKS["nvlink"])
PLAN = Plan(NAMED["llama-3.1-8b"], HOSTS, 8, Work(128 << 10))
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
FETCHED_BY = {"src", "href", "srcset", "data", "poster", "action", "background", "content"}


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in FETCHED_BY]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@pytest.fixture(scope="module")
def text() -> str:
    return page(PLAN)


def test_page_has_every_table_and_sentence(text: str) -> None:
    texts = Elements(text).texts
    for _, cells in (*tables.forms(PLAN), *tables.change_rows(PLAN)):
        assert set(cells) <= set(texts)
    assert {tables.title(PLAN), *tables.sources(PLAN), *verdicts(PLAN)} <= set(texts)
    # The best form, and the plan as it is.
    assert text.count('<tr class="best">') == 2


def test_page_fetches_nothing(text: str) -> None:
    elements = Elements(text)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(elements.tags)
    (picture,) = elements.addresses
    assert picture.startswith("data:image/svg+xml;base64,")
    assert not re.search(r"url\(|@import", text)
    svg = base64.b64decode(picture.partition(",")[2]).decode()
    addresses = [
        value
        for element in ElementTree.fromstring(svg).iter()
        for name, value in element.attrib.items()
        if name.rpartition("}")[2] == "href"
    ] + re.findall(r"url\(([^)]*)\)", svg)
    assert addresses and all(address.startswith("#") for address in addresses)


def test_page_escapes_names() -> None:
    model = llama("<script>&", 2, 64, 128, 4, 2, 100)
    text = page(Plan(model, HOSTS, 1, Work(1)))
    assert "<h1>&lt;script&gt;&amp;, cache" in text and "script" not in Elements(text).tags


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
def test_browser_shows_the_plots_without_a_network(text: str, tmp_path: Path) -> None:
    """A script, added for this, writes what the browser drew and fetched into the page."""
    assert BROWSER is not None
    file = tmp_path / "plan.html"
    report = (
        "<script>onload = () => { document.title = `width ${document.images[0].naturalWidth}; ` +"
        "performance.getEntriesByType('resource').map(each => each.name.slice(0, 5)) }</script>"
    )
    file.write_text(text.replace("</body>", f"{report}</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [
        f"--user-data-dir={tmp_path}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        file.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = re.search(r"<title>width (\d+); ([^<]*)</title>", done.stdout)
    assert found is not None, done.stderr
    assert int(found[1]) > 500 and set(found[2].split(",")) <= {"data:", ""}
