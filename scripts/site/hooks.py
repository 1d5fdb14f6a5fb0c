# SPDX-License-Identifier: BSD-3-Clause
"""Pages of the site: the repository's own, where they lie, and a reference of what is public."""

import importlib
import inspect
import json
import re
import subprocess
from html import unescape
from pathlib import Path
from posixpath import basename, dirname, join, normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from benchmarks.pictures import PICTURES
from estimate import filled
from signatures import MODULES, as_markdown, in_order_of_use
from tree_attention import __version__
from tree_attention._loader import REPOSITORY

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = "benchmarks/results"
ASSETS = ("site.css", "iframe-worker.js")
ESTIMATE, NOTEBOOK = "docs/estimate", "examples/two_ranks"
# The other methods of a communicator are for the exchange itself.
METHODS = "all_merge_states, all_reduce, all_gather, check"
OPTIONS = {"Communicator": f"    options: {{members: [{METHODS}]}}\n"}
_COMMANDS = re.compile(r'<div class="language-sh .*?</div>', re.DOTALL)
# Browsers break lines after a hyphen, of which options have many. An element is left as it is.
_WORD = re.compile(r"<[^>]*>|[^\s<>]+")
_COLUMNS = 45  # of commands on a phone: a longer word has to be broken
_FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def pages() -> list[str]:
    """Return the repository's pages and pictures."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    kinds = ("*.md", "*.png", "*.svg")
    found = subprocess.run([*listed, *kinds], check=True, capture_output=True, text=True).stdout
    return sorted(path for path in found.splitlines() if (ROOT / path).exists())


def as_page(notebook: dict) -> str:
    """Return a notebook's texts, code and what it printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if is_code else source)
        printed = "".join(line for x in cell.get("outputs", ()) for line in x["text"])
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed else []
    return "\n\n".join(parts) + "\n"


def title_of(text: str) -> str:
    return next(line[2:] for line in text.splitlines() if line.startswith("# "))


def reference(name: str) -> str:
    """Return the page of a module's public names."""
    path = f"tree_attention{name}"
    module = importlib.import_module(path)
    entries = "".join(f"\n::: {path}.{x}\n{OPTIONS.get(x, '')}" for x in in_order_of_use(module))
    return f"# {path}\n\n{as_markdown(inspect.getdoc(module))}\n{entries}"


def results() -> dict[str, str]:
    """Return the path of each page of results by a title that no other has."""
    paths = [x for x in pages() if dirname(x) == RESULTS and x.endswith(".md")]
    titles = [title_of((ROOT / path).read_text()) for path in paths]
    return {
        title if titles.count(title) == 1 else f"{title}: {Path(path).stem}": path
        for title, path in zip(titles, paths, strict=True)
    }


def results_index() -> str:
    rows = "\n".join(f"- [{title}]({basename(path)})" for title, path in results().items())
    return f"# Results\n\nOf one machine, each with its command, commit and versions.\n\n{rows}\n"


def on_config(config: MkDocsConfig) -> None:
    config.theme.static_templates.clear()  # the error page and the site map of a server
    folders = {
        "api": [{name[1:] or "tree_attention": f"api/tree_attention{name}.md"} for name in MODULES],
        RESULTS: [{"All": f"{RESULTS}/index.md"}, *({Path(x).stem: x} for x in results().values())],
    }
    config.extra |= {"release": __version__, "licence": "BSD 3-Clause"}
    # With an address the header leads to the repository, and links to sources lead to its files.
    config.repo_url, config.repo_name = REPOSITORY, "Repository"
    config.copyright = f"tree_attention {__version__}, BSD 3-Clause"

    def placed(entry: dict) -> dict:
        ((title, content),) = entry.items()
        if isinstance(content, list):
            return {title: [placed(x) if isinstance(x, dict) else x for x in content]}
        return {title: folders.get(content, content)}

    config.nav = [placed(entry) for entry in config.nav]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put every page where the repository has it, so that links between them are the same."""
    kept = [x for x in files if x.src_dir != config.docs_dir]  # of the theme
    kept += [File(x, str(ROOT), config.site_dir, use_directory_urls=False) for x in pages()]
    made = {f"assets/{name}": (HERE / name).read_text() for name in ASSETS}
    made |= {f"api/tree_attention{name}.md": reference(name) for name in MODULES}
    made[f"{RESULTS}/index.md"] = results_index()
    made[f"{NOTEBOOK}.md"] = as_page(json.loads((ROOT / f"{NOTEBOOK}.ipynb").read_text()))
    made[f"{ESTIMATE}.md"] = "# Estimate\n"
    return Files([*kept, *(File.generated(config, x, content=text) for x, text in made.items())])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to folders to their pages, and links to sources to the repository."""

    def link(match: re.Match) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        path = path.replace(".ipynb", ".md").replace("estimate.html", "estimate.md")
        target = normpath(join(dirname(page.file.src_uri), path))
        for name in (target, f"{target}/README.md", f"{target}/index.md"):
            if files.get_file_from_path(name):
                return f"[{text}]({path}{name.removeprefix(target)}{anchor})"
        if not (ROOT / target).exists():
            return match[0]  # which the strict build refuses
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{target})"
        is_named = text.strip("`").rstrip("/") in (target, basename(target))
        return f"`{target}`" if is_named else f"{text} (`{target}`)"

    if dirname(page.file.src_uri) == RESULTS:
        drawn = [n for n, x in PICTURES.items() if Path(page.file.src_uri).stem in x.results]
        shown = "".join(f"\n\n![Drawn from these results](../../docs/{name})" for name in drawn)
        markdown = re.sub(r"\A(# .*)", lambda title: title[0] + shown, markdown)
    parts = _FENCE.split(markdown)
    for i in range(0, len(parts), 2):
        # Python-Markdown nests lists by four spaces where repository pages take two.
        nested = re.sub(r"^( +)(?=(?:[-*]|\d+\.) )", r"\1\1", parts[i], flags=re.MULTILINE)
        parts[i] = _LINK.sub(link, nested)
    return "".join(parts)


_first_sentences: dict[str, str] = {}


def kept_whole(word: re.Match[str]) -> str:
    is_broken = "-" in word[0] and not word[0].startswith("<") and len(word[0]) <= _COLUMNS
    return f'<span class="word">{word[0]}</span>' if is_broken else word[0]


def on_page_content(html: str, page: Page, **_: object) -> str:
    if page.url == f"{ESTIMATE}.html":
        html += filled((ROOT / f"{ESTIMATE}.html").read_text())
    html = _COMMANDS.sub(lambda block: _WORD.sub(kept_whole, block[0]), html)
    text = re.sub(r"<h1.*?</h1>|<pre.*?</pre>", "", html, flags=re.DOTALL)
    first = re.search(r"<p>(.*?)</p>", text, re.DOTALL)
    words = " ".join(re.sub(r"<[^>]*>", "", first[1]).split()) if first else ""
    _first_sentences[page.url] = re.split(r"(?<=[.!?]) ", unescape(words))[0]
    return html


_pages: list[Page] = []


def on_nav(nav: Navigation, **_: object) -> None:
    _pages[:] = nav.pages


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt: every page with its first sentence, in the order of the menu."""
    rows = "".join(
        f"- [{page.title}]({page.url}): {_first_sentences[page.url]}".removesuffix(": ") + "\n"
        for page in _pages
    )
    text = f"# {config.site_name}\n\n> {config.site_description}\n\n## Pages\n\n{rows}"
    (Path(config.site_dir) / "llms.txt").write_text(text)
