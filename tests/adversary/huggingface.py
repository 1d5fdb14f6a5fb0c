# SPDX-License-Identifier: BSD-3-Clause
"""An enabled model and its cache in random order, against whole sequences without any cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_models import EOS, PAD, VOCAB_SIZE, make_model
from tree_attention import Communicator, hf

from . import model as truth
from .cases import Case, draw_layout
from .outcome import AMPLE, DOCUMENTED, attempt
from .threads import run_threads

_NAMES = ("llama", "llama", "mistral_window", "mistral", "gemma2", "gpt_oss")
# Logits are near 10; a key that is lost, doubled or foreign moves them by a tenth and more.
_LIMIT = 2e-3
_MAX_LENGTH = 100
_CACHE_LIMIT = 200  # slots of a layout that cannot grow


def world_size(case: Case) -> int:
    return case.first.choice([1, 1, 2, 2, 3])


def play(case: Case, rank: int) -> str:
    rng = case.rng
    name = rng.choice(_NAMES)
    torch.manual_seed(case.seed)
    session = Session.begin(rng, name, rank, world_size(case))
    steps: list[str] = []
    digest = []
    try:
        for step in range(rng.randint(3, 8)):
            act = case.draw(KINDS) if step or not case.kind else _forward
            steps.append(act.__name__.strip("_"))
            with torch.no_grad():
                digest.append(act(session, rng))
    except Exception as error:
        raise AssertionError(f"{name}, steps {', '.join(steps)}: {error}") from error
    return f"{steps} {digest}"


@cache
def _whole(name: str) -> PreTrainedModel:
    return make_model(name)


@cache
def _split(name: str, world_size: int, tensor_parallel_size: int) -> PreTrainedModel:
    return hf.parallelize(
        make_model(name),
        group=_group(world_size),
        tensor_parallel_size=tensor_parallel_size,
    )


@cache
def _exact(name: str) -> PreTrainedModel:
    """In transformers' own attention and float64, in one process, without a cache."""
    return make_model(name).double()


@cache
def _group(world_size: int) -> dist.ProcessGroup:
    return dist.new_group(range(world_size))


@cache
def _communicator(world_size: int) -> Communicator:
    return Communicator(_group(world_size) if world_size > 1 else None, AMPLE)


@dataclass
class Session:
    """A conversation: the cache under test, and which token stands where, padding included."""

    name: str
    model: PreTrainedModel
    cache: hf.TreeCache
    ids: Tensor  # [batch, slots]: what the cache holds
    mask: Tensor  # [batch, slots]

    @staticmethod
    def begin(rng: Random, name: str, rank: int, size: int) -> Session:
        options: dict[str, Any] = {"timeout": AMPLE}
        chunk = rng.choice([None, 4, 1024])
        # Of every other model the weights are split, into tensor groups of one rank or of all two.
        tensor_parallel_size = rng.choice([0, 0, 1, 2 if size == 2 else 1]) if size > 1 else 0
        if tensor_parallel_size:
            options["layout"] = draw_layout(rng, size // tensor_parallel_size, _CACHE_LIMIT)
            model = _split(name, size, tensor_parallel_size)
            hf.enable(model, prefill_chunk_size=chunk, **options)
            comm: Any = hf.mesh(model).context_group
        else:
            options["layout"] = draw_layout(rng, size, _CACHE_LIMIT)
            options["strategy"] = rng.choice(["auto", "all_gather", "butterfly", "three_allreduce"])
            comm, prefill = _communicator(size), rng.choice(["auto", "split", "replicated"])
            model = hf.enable(
                _whole(name), comm, prefill=prefill, prefill_chunk_size=chunk, **options
            )
        cached = hf.TreeCache(model.config, comm, growth=rng.choice([1, 5, 1024]), **options)
        batch = rng.choice([1, 2, 3])
        empty = torch.zeros(batch, 0, dtype=torch.long)
        return Session(name, model, cached, empty, empty)

    def draw_tokens(self, rng: Random, *, padded: bool) -> tuple[Tensor, Tensor]:
        batch, count = len(self.ids), rng.choice([1, 1, 2, 9, 30])
        generator = torch.Generator().manual_seed(rng.getrandbits(31))
        ids = torch.randint(3, VOCAB_SIZE, (batch, count), generator=generator)
        mask = torch.ones_like(ids)
        if padded and not self.length:  # padding is on the left of everything
            for row in range(batch):
                padding = rng.randrange(count)
                ids[row, :padding], mask[row, :padding] = PAD, 0
        return torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def keep(self, ids: Tensor, mask: Tensor) -> None:
        self.ids, self.mask = ids, mask
        length = self.cache.get_seq_length()
        assert length == self.length, f"the cache says {length} tokens and holds {self.length}"

    def logits(self, ids: Tensor, mask: Tensor, count: int) -> Tensor:
        """Of the last `count` tokens: every row by itself, from its first token on."""
        rows = []
        for row, seen in zip(ids, mask, strict=True):
            own = _exact(self.name)(row[seen.bool()][None], use_cache=False).logits[0]
            missing = own.new_full((max(0, count - len(own)), VOCAB_SIZE), torch.nan)
            rows.append(torch.cat([missing, own[-count:]]))
        return torch.stack(rows)

    def check(self, found: Tensor, ids: Tensor, mask: Tensor) -> None:
        expected = self.logits(ids, mask, found.shape[1])
        error = torch.where(expected.isfinite(), found.double() - expected, 0.0).abs().max().item()
        assert error < _LIMIT, f"logits are off by {error:.3g}"  # which NaN fails, too


def _forward(session: Session, rng: Random) -> str:
    ids, mask = session.draw_tokens(rng, padded=True)
    if ids.shape[1] > _MAX_LENGTH:
        return _reset(session, rng)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, session.length :]
    new = ids[:, session.length :]
    found = session.model(
        new,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=session.cache,
        logits_to_keep=rng.choice([0, 0, 1]),
    ).logits
    session.check(found, ids, mask)
    session.keep(ids, mask)
    return truth.bits(found)


def _compiled(session: Session, rng: Random) -> str:
    """A step of decoding in one graph."""
    # transformers loops over the values of a tensor in GPT-OSS's experts, which no graph can.
    if not session.length or session.model.config.model_type == "gpt_oss":
        return _forward(session, rng)
    ids = torch.cat([session.ids, torch.full((len(session.ids), 1), rng.randrange(3, 99))], 1)
    torch.compiler.reset()
    forward = torch.compile(session.model.forward, fullgraph=True, backend="aot_eager")
    mask = torch.cat([session.mask, torch.ones_like(ids[:, -1:])], 1)
    positions = (mask.cumsum(1) - 1)[:, -1:]
    found = forward(
        ids[:, -1:], attention_mask=mask, position_ids=positions, past_key_values=session.cache
    ).logits
    session.check(found, ids, mask)
    session.keep(ids, mask)
    return truth.bits(found)


def _generate(session: Session, rng: Random) -> str:
    """A turn: of two tokens that are as good as equal, either may be taken."""
    ids, mask = session.draw_tokens(rng, padded=True)
    count = rng.choice([1, 2, 7])
    if ids.shape[1] + count > _MAX_LENGTH:
        return _reset(session, rng)
    sequences = session.model.generate(
        ids,
        attention_mask=mask,
        past_key_values=session.cache,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
    )
    assert torch.equal(sequences[:, : ids.shape[1]], ids)
    generated = sequences[:, ids.shape[1] :]
    assert generated.shape[1] == count
    mask = torch.cat([mask, torch.ones_like(generated)], 1)
    _check_greedy(session, sequences, mask, count)
    session.keep(sequences[:, :-1], mask[:, :-1])  # nobody has read the last one
    return truth.bits(sequences)


def _check_greedy(session: Session, sequences: Tensor, mask: Tensor, count: int) -> None:
    logits = session.logits(sequences, mask, count + 1)[:, :-1]
    logits[..., EOS] = -torch.inf  # min_new_tokens rules it out
    taken = logits.gather(2, sequences[:, -count:, None])[..., 0]
    short = (logits.amax(-1) - taken).max().item()
    assert short < _LIMIT, f"a token is {short:.3g} below the best"


def _generate_alone(session: Session, rng: Random) -> str:
    """With a cache that `generate` makes for itself."""
    ids, mask = session.draw_tokens(rng, padded=False)
    beams = rng.choice([1, 1, 2])
    sequences = session.model.generate(
        ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False,
        num_beams=beams,
    )  # fmt: skip
    if beams == 1:
        mask = torch.cat([mask, mask.new_ones(len(mask), 4)], 1)
        _check_greedy(session, sequences, mask, 4)
    return truth.bits(sequences)


def _crop(session: Session, rng: Random) -> str:
    count = rng.randint(0, session.length + 2)
    session.cache.crop(-count)
    kept = max(0, session.length - count)
    session.keep(session.ids[:, :kept], session.mask[:, :kept])
    # Rows of padding alone would have nothing to attend to.
    return _reset(session, rng) if kept and not session.mask.any(1).all() else str(kept)


def _reset(session: Session, rng: Random) -> str:
    session.cache.reset()
    session.keep(session.ids[:, :0], session.mask[:, :0])
    return "reset"


def _select(session: Session, rows: list[int]) -> str:
    session.keep(session.ids[rows], session.mask[rows])
    return str(rows)


def _reorder(session: Session, rng: Random) -> str:
    batch = len(session.ids)
    rows = [rng.randrange(batch) for _ in range(batch)]
    session.cache.reorder_cache(torch.tensor(rows))
    return _select(session, rows)


def _repeat(session: Session, rng: Random) -> str:
    if len(session.ids) > 3:
        rows = [rng.randrange(len(session.ids)) for _ in range(2)]
        session.cache.batch_select_indices(torch.tensor(rows))
        return _select(session, rows)
    session.cache.batch_repeat_interleave(2)
    return _select(session, [row for row in range(len(session.ids)) for _ in range(2)])


def _branch(session: Session, rng: Random) -> str:
    """What is done to a copy does nothing to the cache that was copied."""
    kept = copy.copy(session)
    session.cache = copy.deepcopy(session.cache)
    said = _forward(session, rng) + rng.choice([_crop, _reset, _reorder])(session, rng)
    if rng.random() < 0.7:
        session.cache, session.ids, session.mask = kept.cache, kept.ids, kept.mask
    return said


def _refused(session: Session, rng: Random) -> str:
    """A wrong call says so on every rank, and changes nothing that the next one needs."""
    model, cached, length = session.model, session.cache, session.length
    batch = len(session.ids)
    ids = torch.full((batch, 1), 5)
    layer = cached.layers[0]
    seconds = rng.choice([0, -1, float("nan"), float("inf"), "5"])
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    calls: dict[str, Callable[[], Any]] = {
        "max_time": lambda: model.generate(ids, max_time=1.0),
        "paged": lambda: model.generate(ids, cache_implementation="paged"),
        "static": lambda: model.generate(ids, cache_implementation="static"),
        "past_key_values": lambda: model.generate(ids, past_key_values=3),
        "output_attentions": lambda: model.generate(ids, output_attentions=True),
        "offload": layer.offload,
        "crop": lambda: cached.crop(3),
        "timeout": lambda: hf.TreeCache(model.config, cached.shard.comm, timeout=seconds),
        "timeout of enable": lambda: hf.enable(_whole("mistral"), timeout=seconds),
        "timeout of seed_ranks": lambda: hf.seed_ranks(cached.shard.comm, timeout=seconds),
    }
    if length:
        keys = torch.zeros(batch, heads, 1, dim)
        calls |= {
            "sequences": lambda: layer.update(*[torch.zeros(batch + 1, heads, 1, dim)] * 2),
            "dtype": lambda: layer.update(keys.bfloat16(), keys.bfloat16()),
            "new": lambda: model.generate(session.ids, past_key_values=cached),
        }
    name = rng.choice(list(calls))
    outcome = attempt(calls[name])
    if name == "max_time" and cached.shard.world_size == 1 and outcome.error is None:
        return "in a world of one there is one clock"
    kinds = (*DOCUMENTED, hf.WrongAttentionError)
    outcome.refusal((name.split()[0], "TreeCache", "generate", "tree_attention"), kinds)
    assert all(layer.get_seq_length() == length for layer in cached.layers), name
    return f"{name}: {type(outcome.error).__name__}"


def _without_cache(session: Session, rng: Random) -> str:
    """The whole sequence on every rank: right, or refused where it would be spread over none."""
    ids, mask = session.draw_tokens(rng, padded=False)
    if not bool(mask.all()):
        return "padded"
    outcome = attempt(session.model, ids, attention_mask=mask, use_cache=rng.random() < 0.5)
    if outcome.error is not None:
        outcome.refusal(("forward", "TreeCache", "enable", "tree_attention"))
        return type(outcome.error).__name__
    session.check(outcome.value.logits, ids, mask)
    return truth.bits(outcome.value.logits)


def _two_threads(session: Session, rng: Random) -> str:
    """Two turns of generation at once: each is right or refused, and so is every later turn."""
    prompts = [session.draw_tokens(rng, padded=False)[0] for _ in range(2)]
    if session.length:
        return "not now"
    size = session.cache.shard.world_size
    group = dist.new_group(range(size)) if size > 1 else None
    comm = Communicator(group, 3.0)

    # Weights are drawn from one generator, which threads would share.
    models = [hf.enable(make_model("llama"), comm, timeout=3.0) for _ in prompts]
    _exact("llama")

    def body(ids: Tensor, model: PreTrainedModel) -> None:
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        with torch.no_grad():
            outcome = attempt(model.generate, ids, **options)
            if outcome.error is not None:
                outcome.refusal(("rank", "thread"))
                return
            mask = torch.ones_like(outcome.value)
            llama = Session("llama", model, session.cache, ids, mask)
            _check_greedy(llama, outcome.value, mask, 3)

    run_threads({f"turn {i}": lambda i=i: body(prompts[i], models[i]) for i in range(2)}, 4 * AMPLE)  # type: ignore[misc]
    if group is not None:
        dist.destroy_process_group(group)
    return "nothing mixed"


KINDS: dict[str, tuple[float, Callable[[Session, Random], str]]] = {
    "forward": (3, _forward),
    "generate": (3, _generate),
    "generate_alone": (1, _generate_alone),
    "crop": (2, _crop),
    "reset": (1, _reset),
    "reorder": (1, _reorder),
    "repeat": (1, _repeat),
    "branch": (2, _branch),
    "refused": (2, _refused),
    "without_cache": (1, _without_cache),
    "compiled": (0.05, _compiled),
    "two_threads": (0.5, _two_threads),
}
