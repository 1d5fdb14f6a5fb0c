# SPDX-License-Identifier: BSD-3-Clause
"""The algorithms of the Tree Attention paper pass the conformance kit."""

from lab.papers.algorithms import tree
from tree_attention.reference.conformance import DECODE_CASES, check_sharded_decode


def test_sharded_reference_conforms():
    def decode(problem):
        ranges = [problem.key_ranges(rank) for rank in range(len(problem.k_shards))]
        shards = zip(problem.k_shards, problem.v_shards, ranges, strict=True)
        return tree.tree_attention(problem.q, [tree.Shard(*shard) for shard in shards])

    report = check_sharded_decode(decode)
    assert report.passed and [line.case for line in report.lines] == [
        x.name for x in DECODE_CASES
    ], f"\n{report}"
