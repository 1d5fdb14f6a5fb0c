# SPDX-License-Identifier: BSD-3-Clause
"""Regions of Markdown pages that a program writes, between two comments."""

_BEGIN, END = "<!-- written by ", "<!-- end -->\n"


def mark(writer: str) -> str:
    """Return the line that begins the region of a program."""
    return f"{_BEGIN}{writer} -->\n"


def written(page: str, writer: str, text: str) -> str:
    """Return the page with a text in the region of a program."""
    before, begin, rest = page.partition(mark(writer))
    old, end, after = rest.partition(END)
    if not end or _BEGIN in old:  # the end is that of another region
        raise ValueError(f"the page must have a line {mark(writer)!r}, and one {END!r} after it")
    return f"{before}{begin}\n{text}\n\n{end}{after}"
