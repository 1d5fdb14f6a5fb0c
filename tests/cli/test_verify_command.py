# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention verify`, alone and on ranks."""

from pathlib import Path

import pytest

from distributed import run_ranks
from tree_attention import lean_decode, strategies
from tree_attention.__main__ import main
from tree_attention.cli import verify
from tree_attention.cli.world import World


def test_verify_passes(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", str(checkpoint)]) == 0
    output = capsys.readouterr().out
    assert "FAILED" not in output and "checks passed." in output
    assert f"HuggingFace tokens: {checkpoint.name}" in output


def test_verify_fails_with_a_wrong_operator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets_a_key(q, k, v, *args, **kwargs):
        return lean_decode(q, k[:, :, :-1], v[:, :, :-1], *args, **kwargs)

    monkeypatch.setattr(verify, "lean_decode", forgets_a_key)
    monkeypatch.setattr(verify, "check_huggingface", lambda *_: iter(()))
    assert main(["verify"]) == 1
    output = capsys.readouterr().out
    assert "FAILED" in output and "checks failed" in output


def test_verify_skips_without_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name: None)
    (check,) = verify.check_huggingface(None)
    assert check.passed is None
    verify.show([check], World())
    assert "'transformers>=5.5'" in capsys.readouterr().out


def verify_on_ranks(rank: int, world_size: int, wrong_rank: int | None) -> list[verify.Check]:
    world = World(rank, world_size)
    if rank == wrong_rank:

        def forgets_a_key(q, k, v, *args, **options):
            return lean_decode(q, k[:, :, 1:], v[:, :, 1:], *args, **options)

        verify.lean_decode = forgets_a_key
    checks = [*verify.check_operator(), *verify.check_ranks(world)]
    return [verify.in_all_ranks(check, world) for check in checks]


@pytest.mark.parametrize("world_size", [2, 3])
def test_verify_ranks(world_size: int) -> None:
    for checks in run_ranks(verify_on_ranks, world_size, None):
        assert all(check.passed for check in checks)
        same = sum("same bits on all ranks" in check.detail for check in checks)
        assert same == 2 * (len(strategies()) + 2)  # two layouts; the rings are two more ways


def test_verify_reports_the_rank_that_fails() -> None:
    for checks in run_ranks(verify_on_ranks, 2, 1, fresh=True):
        assert checks[0].passed is False and checks[0].detail.startswith("rank 1: ")
