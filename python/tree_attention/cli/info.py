# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention info`: versions, backends, and why one of them is unavailable.

Arguments of every command are looked at before torch is imported, which takes seconds.
"""

from .usage import argument_parser


def main(arguments: list[str]) -> int:
    argument_parser(
        "info",
        "Prints versions and backends, and for each backend that is unavailable the reason.",
        "info",
        "info > report.txt",
    ).parse_args(arguments)
    from .information import run

    run()
    return 0
