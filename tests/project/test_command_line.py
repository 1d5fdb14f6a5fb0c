# SPDX-License-Identifier: BSD-3-Clause
"""The help of commands is whole sentences, with one meaning for each option; docs/command_line.md
has every option of every command, and docs/environment.md every variable."""

import argparse
import re
import runpy
import shlex
from pathlib import Path

import pytest

from tree_attention.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
PROGRAM = runpy.run_path(str(ROOT / "scripts/command_line.py"))


def test_page_has_the_options_of_the_parsers() -> None:
    page = PROGRAM["PAGE"].read_text()
    assert page == PROGRAM["written"](page), "run: PYTHONPATH=python python scripts/command_line.py"
    for command in COMMANDS:
        assert f"\n## {command}\n" in page
        for action in PROGRAM["parser_of"](command)._actions:
            assert all(
                f"`{name}`" in page
                for name in action.option_strings
                if name not in ("-h", "--help")
            )


def options(command: str) -> list[argparse.Action]:
    actions = PROGRAM["parser_of"](command)._actions
    return [x for x in actions if not isinstance(x, argparse._HelpAction)]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_an_option_is_a_sentence_with_its_default(command: str) -> None:
    for action in options(command):
        name, text = "/".join(action.option_strings) or action.dest, action.help or ""
        assert text[:1].isupper() and text.endswith("."), f"{command} {name}: {text}"
        assert len(text.split()) >= 4 or not action.option_strings, f"{command} {name}: {text}"
        told = re.search(PROGRAM["DEFAULT"], text)
        if action.default not in (None, False, argparse.SUPPRESS) and action.option_strings:
            assert told, f"{command} {name}: no (default: ...)"
            shown = action.default
            assert told[1] == (f"{shown:g}" if isinstance(shown, float) else str(shown))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_two_calls_that_the_parser_takes(command: str) -> None:
    calls = re.findall(r"^  \S.*", PROGRAM["parser_of"](command).epilog or "", re.MULTILINE)
    assert len(calls) >= 2
    for call in calls:
        program, *words = shlex.split(re.sub(r" >.*| {2,}\(.*", "", call))
        assert program == "tree-attention"
        if words[:1] == ["run"] != [command]:
            words = words[words.index("tree_attention") + 1 :]
        assert words[0] == command
        PROGRAM["parser_of"](command).parse_args(words[1:])


def test_an_option_has_one_object_in_all_commands() -> None:
    """Its help begins with the same words, up to what a command adds or the default."""
    objects: dict[str, str] = {}
    for command in COMMANDS:
        for action in options(command):
            begins = re.split(r" \(|[,.:;]", action.help or "")[0]
            for name in action.option_strings:
                earlier = objects.setdefault(name, begins)
                assert begins == earlier, f"{name}: {begins!r}, elsewhere {earlier!r}"


def test_an_option_with_a_value_has_an_example() -> None:
    """In a call of a command's help or in its own help, unless its values are listed."""
    parsers = [PROGRAM["parser_of"](command) for command in COMMANDS]
    calls = shlex.split(" ".join(parser.epilog or "" for parser in parsers))
    for command in COMMANDS:
        for action in options(command):
            takes_any = action.option_strings and action.nargs != 0 and action.choices is None
            if takes_any and "such as" not in (action.help or ""):
                assert {*action.option_strings} & {*calls}, f"{command} {action.option_strings[-1]}"


def test_an_option_has_values_of_one_kind_in_all_commands() -> None:
    values: dict[str, set[str]] = {}
    for command in COMMANDS:
        for action in options(command):
            for name in action.option_strings if action.choices is not None else ():
                # Commands may take fewer of the values, and have a default of their own, but the
                # values are of one kind.
                now = {*action.choices} - {"auto", "bf16"}
                earlier = values.setdefault(name, now)
                assert now <= earlier or earlier <= now, f"{name}: {now}, elsewhere {earlier}"


def test_variables_of_the_sources_are_on_the_page() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    named = set(re.findall(r"^\| `([A-Z_]+)`", page, re.MULTILINE))
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    text = "\n".join(source.read_text() for source in sources)
    ours = {"TREE_ATTENTION_VLLM", "TREE_ATTENTION_COSTS", "TREE_ATTENTION_NODE"}
    ours.add("TREE_ATTENTION_VLLM_CASCADE")
    ours |= {*re.findall(r"(?:getenv|environ\.get|check_env)\(\"(TREE_ATTENTION_[A-Z_]+)\"", text)}
    assert "TREE_ATTENTION_CHECK_PAGES" in ours and ours <= named
    assert {x for x in named if x.startswith("TREE_ATTENTION_")} <= {
        *re.findall(r"\bTREE_ATTENTION_[A-Z_]+", text)
    }
