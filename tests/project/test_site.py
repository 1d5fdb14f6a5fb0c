# SPDX-License-Identifier: BSD-3-Clause
"""The site that `scripts/docs` builds: its links, pages and arguments, and its search."""

import importlib
import inspect
import re
import subprocess
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from benchmarks.pictures import PICTURES
from browser import console_of, needs_browser, on_a_phone

pytest.importorskip("mkdocs", reason="the site is built where Python >= 3.11 is")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.deep
_LINK = re.compile(r"<(a|script|img|iframe|source|link)\s[^>]*?\b(?:href|src)=\"([^\"]+)\"")


class Site:
    """The pages of a folder, with the links and fetched files of each, and its anchors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.html = {path: path.read_text() for path in sorted(self.folder.rglob("*.html"))}
        self.links = {
            # Scripts hold text that looks like elements.
            path: _LINK.findall(re.sub(r"(<script[^>]*>)[^<]*(?=</script>)", r"\1", html))
            for path, html in self.html.items()
        }
        self.anchors = {
            path: {unescape(x) for x in re.findall(r"\b(?:id|name)=\"([^\"]+)\"", html)}
            for path, html in self.html.items()
        }

    def target(self, page: Path, link: str) -> tuple[Path, str]:
        parts = urlsplit(unescape(link))
        path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        return path, unquote(parts.fragment)

    def broken(self) -> list[str]:
        found = []
        for page, links in self.links.items():
            for tag, link in links:
                path, anchor = self.target(page, link)
                is_outside = tag == "a" and link.startswith(("https:", "http:", "mailto:"))
                is_there = path.is_file() and self.folder in path.parents and "//" not in link
                if not is_outside and not (
                    is_there and (not anchor or anchor in self.anchors.get(path, ()))
                ):
                    found.append(f"{page.relative_to(self.folder)}: {link}")
        return found

    def reached(self) -> set[Path]:
        """Return the pages to which links lead from the first."""
        found, waiting = set[Path](), [self.folder / "index.html"]
        while waiting:
            path = waiting.pop()
            if path in self.links and path not in found:
                found.add(path)
                waiting += [self.target(path, link)[0] for _, link in self.links[path]]
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    command = [ROOT / "scripts/docs", "--site-dir", folder]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (
        "Documentation built" in built.stderr
    )  # a quiet build counts no warnings: none would fail
    return Site(folder)


def test_links_and_pictures_lead_somewhere_inside(site: Site) -> None:
    assert len(site.html) > 60 and sum(map(len, site.links.values())) > 4000
    assert not site.broken()
    styles = [*site.html.values(), *(path.read_text() for path in site.folder.rglob("*.css"))]
    assert not [x for x in styles if re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", x)]


def test_every_page_is_reached_and_listed(site: Site) -> None:
    assert site.reached() == site.html.keys()
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", (site.folder / "llms.txt").read_text(), re.M)
    assert sorted(listed) == sorted(str(x.relative_to(site.folder)) for x in site.html)


def test_every_picture_is_on_a_page(site: Site) -> None:
    shown = {site.target(x, link)[0] for x in site.links for t, link in site.links[x] if t == "img"}
    drawn = {
        x
        for name in ("docs", "benchmarks", "examples", "lab")
        for x in (site.folder / name).rglob("*")
    }
    pictures = {path for path in drawn if path.suffix in (".png", ".svg")}
    assert len(pictures) > 8 and pictures <= shown
    for name, picture in PICTURES.items():
        for results in picture.results:
            assert f"docs/{name}" in site.html[site.folder / f"benchmarks/results/{results}.html"]


def headings_of(site: Site, module: str) -> list[str]:
    html = (site.folder / f"api/{module}.html").read_text()
    found = re.findall(rf'<h2 id="{re.escape(module)}\.(\w+)"', html)
    assert found
    return found


def test_the_reference_begins_with_what_is_called_first(site: Site) -> None:
    names = headings_of(site, "tree_attention")
    assert names[:3] == ["lean_decode", "all_merge_states", "tree_decode"]
    assert names[-1] == "ExchangeError"
    package = importlib.import_module("tree_attention")
    kinds = [inspect.isclass(getattr(package, x)) for x in names]
    assert kinds == sorted(kinds) and 0 < sum(kinds) < len(kinds)
    assert headings_of(site, "tree_attention.hf")[:2] == ["from_pretrained", "enable"]


def test_every_page_shows_version_and_licence_and_the_menu_is_short(site: Site) -> None:
    version = importlib.import_module("tree_attention").__version__
    for html in site.html.values():
        header = html.partition("<header")[2].partition("</header>")[0]
        assert re.search(rf'CHANGELOG.html">{re.escape(version)}</a> BSD 3-Clause', header)
    titles = re.findall(r"^- \[([^\]]+)\]", (site.folder / "llms.txt").read_text(), re.M)
    assert len(titles) > 60 and max(map(len, titles)) <= 32, max(titles, key=len)


# What is wider than its place: lines of commands, what cannot be scrolled, what fades where it goes
# on; and widths of the page, of its pictures and of the table of costs.
WIDE = """(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const edge = 4;  // the padding of an inline code may end outside of its line
  const wide = (selector) => all(selector).filter((x) => x.scrollWidth > x.clientWidth + edge);
  // The first column of a table leaves room to see how its rows go on.
  const first = all(".md-typeset__table tr > :first-child").map((x) => x.clientWidth);
  const places = ".md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset p";
  return {
    page: document.documentElement.scrollWidth,
    commands: wide(".language-sh code").length,
    hidden: wide(places).filter((x) => getComputedStyle(x).overflowX !== "auto").length,
    scrolled: wide(places).length,
    fading: wide(places).filter((x) => getComputedStyle(x).maskImage !== "none").length,
    first: Math.max(0, ...first),
    pictures: all(".md-typeset img").map((x) => x.clientWidth),
    costs: Math.max(0, ...all(".costs td, .costs th").map((x) => x.getBoundingClientRect().right)),
  };
})()"""

PHONE_PAGES = [
    "index",
    "benchmarks/index",
    "docs/chosen_keys",
    "docs/command_line",
    "docs/estimate",
]
PHONE_PAGES += ["docs/engine_reference", "docs/gpu", "docs/measured", "docs/support"]
PHONE_PAGES += ["docs/troubleshooting", "docs/two_servers"]


@needs_browser
@pytest.mark.parametrize("page", PHONE_PAGES)
def test_a_phone_shows_all_or_that_there_is_more(site: Site, page: str, tmp_path: Path) -> None:
    found = on_a_phone(site.folder / f"{page}.html", WIDE, tmp_path)
    assert found["page"] <= 390 and found["commands"] == found["hidden"] == 0
    assert found["first"] < 250
    if page == "docs/estimate":
        assert 300 < found["costs"] <= 390
    assert found["fading"] == found["scrolled"]
    if page == "index":
        assert len(found["pictures"]) == 3 and min(found["pictures"]) > 700


def entry_of(site: Site, module: str, name: str) -> str:
    """Return the text of the reference from the heading of a name to the next heading."""
    html = (site.folder / f"api/{module}.html").read_text()
    _, found, rest = html.partition(f'id="{module}.{name}"')
    assert found, f"{module}.{name} has no entry"
    return unescape(re.sub(r"<[^>]*>", "", re.split(r"<h[12] ", rest)[0]))


def test_every_public_name_has_an_entry_with_its_arguments(site: Site) -> None:
    from signatures import MODULES, public  # for which mkdocs must be there

    count = 0
    for module in [importlib.import_module(f"tree_attention{name}") for name in MODULES]:
        for name in public(module):
            entry, thing = entry_of(site, module.__name__, name), getattr(module, name)
            if not callable(thing):
                continue
            try:
                arguments = inspect.signature(thing).parameters
            except ValueError:  # of an exception or a typed dictionary
                arguments = getattr(thing, "__annotations__", {})
            assert inspect.isclass(thing) or re.search(rf"^\s*{name}\(", entry, re.MULTILINE), name
            missing = [x for x in arguments if not re.search(rf"\b{x}\b", entry)]
            assert not missing, f"{name} says nothing of {missing}"
            count += len(arguments)
    assert count > 200
    passed_on = " ".join(entry_of(site, "tree_attention", "tree_decode").split())
    assert re.search(r"softcap \(float, default: 0\.0 \) \S 0 is off", passed_on)


def test_broken_pages_are_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<h1 id="a"></h1><a href="b.html#x">b</a><a href="#a">a</a><a href="#b">b</a>'
        '<img src="no.png"><a href="https://x.org">c</a><script src="https://x.org"></script>'
    )
    for name in ("b", "c"):
        (tmp_path / f"{name}.html").write_text('<p id="y"></p>')
    site = Site(tmp_path)
    wrong = ["b.html#x", "#b", "no.png", "https://x.org"]
    assert site.broken() == [f"index.html: {link}" for link in wrong]
    assert {path.name for path in site.html.keys() - site.reached()} == {"c.html"}


@needs_browser
def test_search_works_from_a_folder(site: Site) -> None:
    dom, errors = console_of(f"file://{site.folder}/docs/cache.html?q=softmax_scale")
    assert not errors
    assert int(re.search(r"(\d+) matching documents", dom)[1]) > 3
