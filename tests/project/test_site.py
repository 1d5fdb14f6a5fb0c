# SPDX-License-Identifier: BSD-3-Clause
"""The site that `scripts/docs` builds: its links, pages and arguments, and its search."""

import importlib
import inspect
import re
import subprocess
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from browser import console_of, needs_browser

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs", reason="the site is built where Python >= 3.11 is")
pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]
# Of a page; links that a reader may follow out of the site are none.
_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Html(HTMLParser):
    """Anchors, links and fetched files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.anchors = path, set[str]()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if found.get(_FETCHED.get(tag, "")):
            self.fetched.append(found[_FETCHED[tag]])

    def target(self, link: str) -> tuple[Path, str]:
        parts = urlsplit(link)
        path = (self.path.parent / unquote(parts.path)).resolve() if parts.path else self.path
        return path, unquote(parts.fragment)


class Site:
    """A built site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.pages = {path: Html(path) for path in sorted(self.folder.rglob("*.html"))}

    def broken(self) -> list[str]:
        found = []
        for page in self.pages.values():
            for link in (*page.links, *page.fetched):
                if urlsplit(link).scheme in ("https", "http", "mailto"):
                    continue
                path, anchor = page.target(link)
                is_there = path.is_file() and self.folder in path.parents
                has_anchor = not anchor or anchor in getattr(self.pages.get(path), "anchors", ())
                if not (is_there and has_anchor):
                    found.append(f"{page.path.relative_to(self.folder)}: {link}")
        return found

    def reached(self) -> set[Path]:
        """Return the pages to which links lead from the first."""
        found, waiting = set[Path](), [self.folder / "index.html"]
        while waiting:
            path = waiting.pop()
            if path in self.pages and path not in found:
                found.add(path)
                waiting += [self.pages[path].target(link)[0] for link in self.pages[path].links]
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    command = [ROOT / "scripts/docs", "--site-dir", folder]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return Site(folder)


def test_links_and_pictures_lead_somewhere(site: Site) -> None:
    assert len(site.pages) > 60
    assert not site.broken()


def test_every_page_is_reached_and_listed(site: Site) -> None:
    assert site.reached() == site.pages.keys()
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", (site.folder / "llms.txt").read_text(), re.M)
    assert sorted(listed) == sorted(str(x.relative_to(site.folder)) for x in site.pages)


def test_nothing_is_fetched_from_a_network(site: Site) -> None:
    outside = re.compile(r"url\(\s*['\"]?(?:https?:)?//|@import")
    assert not [x for page in site.pages.values() for x in page.fetched if "//" in x]
    styles = [*site.folder.rglob("*.css"), *site.pages]
    assert len(styles) > len(site.pages) + 2
    assert not [path for path in styles if outside.search(path.read_text())]


def public_names() -> Iterator[tuple[str, str, object]]:
    from hooks import MODULES, public  # which mkdocs must be there for

    for name in MODULES:
        module = importlib.import_module(f"tree_attention{name}")
        for entry in public(module):
            yield f"tree_attention{name}.html", f"tree_attention{name}.{entry}", vars(module)[entry]


def entry_of(html: str, name: str) -> str:
    """Return the text of the reference from the heading of a name to the next heading."""
    _, found, rest = html.partition(f'id="{name}"')
    assert found, f"{name} has no entry"
    return unescape(re.sub(r"<[^>]*>", "", re.split(r"<h[12] ", rest)[0]))


def test_every_public_name_has_an_entry_with_its_arguments(site: Site) -> None:
    count = 0
    for page, name, thing in public_names():
        entry = entry_of((site.folder / "api" / page).read_text(), name)
        if not callable(thing):
            continue
        try:
            arguments = inspect.signature(thing).parameters
        except ValueError:  # of an exception or a typed dictionary
            arguments = getattr(thing, "__annotations__", {})
        missing = [x for x in arguments if not re.search(rf"\b{x}\b", entry)]
        assert not missing, f"{name} says nothing of {missing}"
        count += len(arguments)
        described = re.search(r"^Args:", inspect.getdoc(thing) or "", re.MULTILINE)
        assert not described or "Parameters:" in entry
    assert count > 200


def test_an_option_is_described_where_it_is_passed_on(site: Site) -> None:
    page = (site.folder / "api/tree_attention.html").read_text()
    entry = " ".join(entry_of(page, "tree_attention.tree_decode").split())
    assert re.search(r"softcap \(float, default: 0\.0 \) \S 0 is off", entry)


def test_broken_pages_are_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<h1 id="a"></h1><a href="b.html#x">b</a><a href="#a">a</a><a href="#b">b</a>'
        '<img src="no.png"><a href="https://x.org/no">c</a>'
    )
    for name in ("b", "c"):
        (tmp_path / f"{name}.html").write_text('<p id="y"></p>')
    site = Site(tmp_path)
    assert site.broken() == ["index.html: b.html#x", "index.html: #b", "index.html: no.png"]
    assert {path.name for path in site.pages.keys() - site.reached()} == {"c.html"}


@needs_browser
def test_search_works_from_a_folder(site: Site) -> None:
    page = f"file://{site.folder}/docs/cache.html?q=softmax_scale"
    dom, errors = console_of(page)
    assert not errors
    assert int(re.search(r"(\d+) matching documents", dom)[1]) > 3
