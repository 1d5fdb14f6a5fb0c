# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention verify`, alone and on ranks."""

from pathlib import Path

import pytest
import torch

from distributed import run_ranks
from tree_attention import lean_decode, strategies
from tree_attention.__main__ import main
from tree_attention.cli import verification
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

    monkeypatch.setattr(verification, "lean_decode", forgets_a_key)
    monkeypatch.setattr(verification, "check_huggingface", lambda *_: iter(()))
    assert main(["verify"]) == 1
    output = capsys.readouterr().out
    assert "FAILED" in output and "checks failed" in output


def test_a_check_that_raises_is_a_row_and_the_rest_run(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each dtype, of the merge and of each model."""

    def raises(*args, **kwargs):
        raise RuntimeError("the mask has [3, 1]\nand more")

    def takes_no_bfloat16(q, *args, **kwargs):
        return raises() if q.dtype == torch.bfloat16 else lean_decode(q, *args, **kwargs)

    def refuses_padding(name, model, ids, mask):
        yield from check_tokens(name, model, ids, mask) if mask.all() else raises()

    check_tokens = verification.check_tokens
    monkeypatch.setattr(verification, "lean_decode", takes_no_bfloat16)
    monkeypatch.setattr(verification, "merge_states", raises)
    monkeypatch.setattr(verification, "check_tokens", refuses_padding)
    assert main(["verify", "--model", str(checkpoint)]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert all("the mask has [3, 1]" in row and "and more" not in row for row in rows)
    assert [row.split("│")[1].strip() for row in rows] == [
        "bfloat16: RuntimeError",
        "merge: RuntimeError",
        "HuggingFace tokens: random Llama, padded batch: RuntimeError",
    ]


def test_verify_skips_without_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification.importlib.util, "find_spec", lambda name: None)
    (check,) = verification.check_huggingface(None)
    assert check.passed is None
    verification.show([check], World())
    assert "'transformers>=5.5'" in capsys.readouterr().out


def verify_on_ranks(rank: int, world_size: int, wrong_rank: int | None) -> list[verification.Check]:
    world = World(rank, world_size)
    if rank == wrong_rank:

        def forgets_a_key(q, k, v, *args, **options):
            return lean_decode(q, k[:, :, 1:], v[:, :, 1:], *args, **options)

        verification.lean_decode = forgets_a_key
    checks = [*verification.check_operator(), *verification.check_ranks(world)]
    return verification.in_all_ranks(checks, world)


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [2, 3])
def test_verify_ranks(world_size: int) -> None:
    for checks in run_ranks(verify_on_ranks, world_size, None):
        assert all(check.passed for check in checks)
        same = sum("same bits on all ranks" in check.detail for check in checks)
        assert same == 2 * (len(strategies()) + 2)  # two layouts; the rings are two more ways


def raise_on_a_rank(rank: int, world_size: int) -> list[verification.Check]:
    def made():
        yield verification.Check("first", True, "fine")
        if rank == 1:
            raise ValueError("too few bytes")
        yield verification.Check("second", True, "fine")

    checks = list(verification.until_error("kind", made()))
    return verification.in_all_ranks(checks, World(rank, world_size))


def test_verify_on_ranks_of_which_one_raises() -> None:
    failed = verification.Check("kind: ValueError", False, "rank 1: too few bytes")
    of_first, of_second = run_ranks(raise_on_a_rank, 2)
    assert [check.name for check in of_first] == ["first", "second", "kind: ValueError"]
    assert of_first[-1] == of_second[-1] == failed


def test_verify_reports_the_rank_that_fails() -> None:
    for checks in run_ranks(verify_on_ranks, 2, 1, fresh=True):
        assert checks[0].passed is False and checks[0].detail.startswith("rank 1: ")
