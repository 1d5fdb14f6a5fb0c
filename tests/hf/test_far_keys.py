# SPDX-License-Identifier: BSD-3-Clause
"""Older keys in the host's memory, newer ones on a GPU, which is a fake device here.

The mistakes these tests are for: a key that is on neither side or on both, one that is read before
it has come, keys that travel in a decoding step, rows of pages that beams do not follow, and a page
of one cache that is overwritten by its copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import on_ranks, run_ranks
from dry_device import leave_device
from fake_device import Event, counted_copies, fake_cuda
from tiers import tiers

pytest.importorskip("transformers")

import hf_families
from generations import greedy, left_padded, nan_in_new_memory
from hf_families import CHOOSING, HYBRIDS, OWN_ATTENTION
from hf_families import make_model as make_family
from hf_models import VOCAB_SIZE, make_model, make_prompts
from rounded_caches import rounded_cache
from tree_attention import BlockCyclic, ExchangeError, hf
from tree_attention.exchange import Communicator
from tree_attention.hf import CACHE_NAME, parts
from tree_attention.hf.cache import far, memory
from tree_attention.hf.cache.growing import CROP_KEEPS
from tree_attention.sharding import ContiguousThenCyclic

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is imitated")

GREEDY = greedy(14)
LONG = greedy(22)  # in a world of two enough to move what a prompt in one pass has left
FAR: dict[str, Any] = {"far": "cpu", "near_tokens": 6}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "long": LONG,
    "chunks": GREEDY | {"prefill_chunk_size": 7},
    "beams": GREEDY | {"num_beams": 3, "prefill_chunk_size": 7},
    "sequences": GREEDY | {"num_beams": 4, "num_return_sequences": 2, "prefill_chunk_size": 9},
}


@contextmanager
def small_sizes(most_rows: int | None = None) -> Iterator[None]:
    """Keys come to the device in several parts, if there are more rows of queries than this."""
    with ExitStack() as stack:
        stack.enter_context(fake_cuda())
        stack.enter_context(mock.patch.object(far, "_MORE_PAGES", 2))
        for module in (far, parts):
            stack.enter_context(mock.patch.object(module, "_PAGES_AT_A_TIME", 2))
        if most_rows is not None:
            stack.enter_context(mock.patch.object(parts, "_MOST_ROWS_ON_HOST", most_rows))
        yield


def make(name: str) -> Any:
    families = HYBRIDS | OWN_ATTENTION | CHOOSING
    return make_family(families[name]) if name in families else make_model(name)


def new_cache(model: Any, world_size: int = 1, **options: Any) -> hf.TreeCache:
    layout = options.pop("layout", BlockCyclic(world_size, 4))
    return hf.TreeCache(model.config, layout=layout, growth=4, **{**FAR, **options})


def on_device(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to("cuda") for name, x in tensors.items()}


def far_layers(cache: hf.TreeCache) -> list[far.FarLayer]:
    return [layer for layer in cache.kv_layers if isinstance(layer, far.FarLayer)]


def long_prompts(world_size: int) -> dict[str, Tensor]:
    """So long that each rank has keys that are far."""
    return make_prompts(length=24 + 16 * world_size)


def generate(
    rank: int,
    world_size: int,
    name: str,
    case: str,
    most_rows: int | None,
    options: dict[str, Any],
    tokens: Tensor,
) -> None:
    model, prompts = make(name), long_prompts(world_size)
    with small_sizes(most_rows):
        hf.enable(model.to("cuda"), layout=BlockCyclic(world_size, 4), **FAR, **options)
        cache = new_cache(model, world_size, near_tokens=6 + rank, **options)
        # As a cache that generate makes, half of whose prompt is known.
        cache.reserve(20)
        found = model.generate(**on_device(prompts), **CASES[case], **{CACHE_NAME: cache})
        layers = far_layers(cache)
        assert layers and all(layer.dropped >= 4 for layer in layers)
        assert all(layer.buffers()["keys"].is_cuda for layer in layers)
        assert not any(run.buffers["keys"].is_cuda for x in layers for run in x.host.runs)
        assert torch.equal(found.cpu(), tokens)
        leave_device()


@pytest.mark.parametrize(
    "name, case, world_size, most_rows",
    tiers(
        [
            ("llama", "chunks", 2, 0),
            ("gemma2", "chunks", 1, None),
        ],
        [
            ("llama", "greedy", 1, None),
            ("llama", "beams", 3, None),
            ("llama", "sequences", 1, 0),
            ("llama", "chunks", 3, None),
            ("llama", "sequences", 2, None),
            ("gemma2", "greedy", 1, 0),
            ("gpt_oss", "chunks", 2, 0),
            ("gpt_oss", "beams", 1, None),
            ("qwen3_moe", "chunks", 2, None),
        ],
    ),
)
def test_tokens_are_those_of_transformers(
    name: str, case: str, world_size: int, most_rows: int | None
) -> None:
    """Near tokens differ by rank, and prompts are padded."""
    arguments = {key: x for key, x in CASES[case].items() if key != "prefill_chunk_size"}
    tokens = make(name).generate(**long_prompts(world_size), **arguments)
    run_ranks(generate, world_size, name, case, most_rows, {}, tokens)


@pytest.mark.parametrize("world_size, most_rows", tiers([(1, None)], [(2, 0)]))
def test_keys_of_8_bits(world_size: int, most_rows: int | None) -> None:
    model = make_model("llama")
    rounded = rounded_cache(model.config, "int8")
    tokens = model.generate(**long_prompts(world_size), **GREEDY, **{CACHE_NAME: rounded})
    run_ranks(generate, world_size, "llama", "chunks", most_rows, {"kv_dtype": "int8"}, tokens)


def generate_from_family(
    rank: int, world_size: int, name: str, most_rows: int | None, tokens: Tensor, logits: Tensor
) -> None:
    model = make(name)
    options = LONG | {"output_logits": True, "return_dict_in_generate": True}
    with small_sizes(most_rows):
        hf.enable(model.to("cuda"), layout=BlockCyclic(world_size, 4), **FAR)
        cache = new_cache(model, world_size)
        prompts = on_device(left_padded(hf_families.VOCAB_SIZE, 29, (0, 9, 4), seed=4))
        # In one pass, which hybrids of some releases need, and the far keys in steps.
        found = model.generate(**prompts, **options, **{CACHE_NAME: cache})
        assert all(layer.dropped >= 4 for layer in far_layers(cache))
        assert torch.equal(found.sequences.cpu(), tokens)
        for ours, theirs in zip(found.logits, logits, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-3)
        leave_device()


# transformers asks a GPU how it multiplies groups of experts, and the fake one does not know.
FAMILIES = [*OWN_ATTENTION, *(name for name in ("Bamba", "LFM2") if HYBRIDS[name].exists)]


@pytest.mark.parametrize(
    "name, world_size, most_rows",
    tiers(
        [(FAMILIES[-1], 1, None)],
        [
            (FAMILIES[0], 2, None),
            *((name, 1 + i % 2, (None, 0)[i % 2]) for i, name in enumerate(FAMILIES)),
        ],
    ),
)
def test_families(name: str, world_size: int, most_rows: int | None) -> None:
    """With ALiBi, which counts positions of both parts, and next to layers that keep a state."""
    prompts = left_padded(hf_families.VOCAB_SIZE, 29, (0, 9, 4), seed=4)
    expected = make(name).generate(
        **prompts, **LONG, output_logits=True, return_dict_in_generate=True
    )
    run_ranks(
        generate_from_family,
        world_size,
        name,
        most_rows,
        expected.sequences,
        torch.stack(expected.logits),
    )


class Both:
    """A cache with far keys and one without, which get the same tokens and changes."""

    def __init__(self, model: Any, world_size: int, batch: int, **options: Any) -> None:
        self.model, self.mask = model, torch.zeros(batch, 0, dtype=torch.int64)
        self.generator = torch.Generator().manual_seed(3)
        self.far = new_cache(model, world_size, **options)
        self.plain = new_cache(model, world_size, **{**options, "far": None, "near_tokens": None})

    def feed(self, count: int, padding: int = 0) -> None:
        """Appends tokens, and compares the logits."""
        batch = len(self.mask)
        ids = torch.randint(3, VOCAB_SIZE, (batch, count), generator=self.generator).to("cuda")
        ones = torch.ones(batch, count, dtype=torch.int64)
        ones[-1, :padding] = 0
        self.mask = torch.cat((self.mask, ones), 1)
        found, expected = (
            self.model(ids, attention_mask=self.mask.to("cuda"), **{CACHE_NAME: cache}).logits
            for cache in (self.far, self.plain)
        )
        seen = self.mask[:, -count:] == 1
        torch.testing.assert_close(found.cpu()[seen], expected.cpu()[seen], rtol=1e-4, atol=1e-4)

    def crop(self, count: int) -> None:
        length = self.mask.shape[1]
        for cache in (self.far, self.plain):
            cache.crop(length - count if CROP_KEEPS else -count)
        self.mask = self.mask[:, : length - count]

    def select(self, rows: list[int]) -> None:
        for cache in (self.far, self.plain):
            cache.batch_select_indices(torch.tensor(rows, device="cuda"))
        self.mask = self.mask[rows]

    def copy(self) -> Both:
        new = copy.copy(self)
        new.far, new.plain = copy.deepcopy(self.far), copy.deepcopy(self.plain)
        new.generator = torch.Generator().manual_seed(4)
        return new


def change(rank: int, world_size: int, most_rows: int | None, layout: Any) -> None:
    model = make_model("llama", "tree_attention")
    options = {} if layout is None else {"layout": layout}
    with small_sizes(most_rows), nan_in_new_memory():
        both = Both(model.to("cuda"), world_size, 3, **options)
        both.feed(19 * world_size, padding=5)
        for count in (1, 1, 9, 1, 1, 2, 1, 17, 1, 1):
            both.feed(count)
        # The copy and the original go on over the same page, each for itself.
        other = both.copy()
        for each in (both, other, both, other):
            for count in (5, 1, 1, 7):
                each.feed(count)
        assert all(layer.host.count > layer.dropped > 8 for layer in far_layers(both.far))
        both.crop(3)  # of what is near
        both.feed(1)
        held = far_layers(both.far)[0].dropped
        both.crop(both.mask.shape[1] - 3 * world_size * 4 + 2)  # and into the far keys
        assert far_layers(both.far)[0].dropped < held
        for count in (1, 1, 8, 1, 1, 1, 1, 1):
            both.feed(count)
        for count in (1, 6, 1):
            other.feed(count)
        both.select([2, 0, 0, 1])
        for count in (1, 3, 5, 1, 4, 1):
            both.feed(count)
        both.select([3])
        for count in (1, 6, 7, 1):
            both.feed(count)
        for cache in (both.far, both.plain):
            cache.reset()
        both.mask = both.mask[:1, :0].repeat(2, 1)
        for count in (11, 7, 7, 1, 1, 1):
            both.feed(count)
        leave_device()


@pytest.mark.parametrize(
    "world_size, most_rows", tiers([(1, 0)], [(2, None), (1, None), (2, 0), (3, 0)])
)
def test_changes_of_a_cache(world_size: int, most_rows: int | None) -> None:
    """Crop, copies, rows that are chosen and repeated, and reset."""
    run_ranks(change, world_size, most_rows, None)


@pytest.mark.deep
def test_a_layout_of_a_prompt() -> None:
    run_ranks(change, 2, None, ContiguousThenCyclic((0, 6, 19), block=4))


def test_a_pass_that_was_interrupted() -> None:
    model = make_model("llama", "tree_attention")
    with small_sizes():
        both = Both(model.to("cuda"), 1, 2)
        for count in (9, 9, 9):
            both.feed(count)
        layer = far_layers(both.far)[1]
        interrupted = mock.patch.object(layer, "begin", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            both.feed(9)
        both.mask = both.mask[:, :27]
        both.far.crop(27 if CROP_KEEPS else 0)
        both.feed(9)
        both.feed(1)


def _rows(count: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 2, count, 8).to("cuda")
    return x, x


@pytest.mark.deep
def test_what_crosses_the_bus() -> None:
    """Each key once, when it moves. A step sends queries, ranges and a state."""
    model = make_model("llama", "tree_attention")
    num_layers, page = 2, 64
    row_bytes = 2 * 2 * 8 * 4  # keys and values of two heads in float32
    to_host, steps = [], list[list[tuple[str, int]]]()
    with fake_cuda():
        model, token = model.to("cuda"), torch.tensor([[7]], device="cuda")
        cache = hf.TreeCache(model.config, growth=page, far="cpu", near_tokens=300)
        for _ in range(6):
            with counted_copies() as copies:
                for number in range(num_layers):
                    cache.update(*_rows(2000, batch=1), number)
            to_host += [size for way, size in copies if way == "to host"]
        for _ in range(page + 60):
            with counted_copies() as copies:
                model(token, **{CACHE_NAME: cache})
            steps.append(copies)
    layer = far_layers(cache)[0]
    assert layer.dropped > 9_000
    key_bytes = page * row_bytes // 2
    to_host += [size for step in steps for way, size in step if size >= key_bytes]
    assert sum(to_host) == num_layers * layer.host.count * row_bytes
    # Of a hundred steps one or two move pages, and only that one sends as much as a page.
    moving = [step for step in steps if any(size >= key_bytes for _, size in step)]
    assert 0 < len(moving) <= 2 and all(way == "to host" for x in moving for way, n in x if n > 999)
    others = [sum(size for _, size in step) for step in steps if step not in moving]
    assert 0 < max(others) <= num_layers * layer.dropped * row_bytes / 1000


def test_nothing_is_read_before_it_has_come() -> None:
    """If the host did not wait for an event, it would read what is on its way."""
    model = make_model("llama", "tree_attention")
    with small_sizes():
        both = Both(model.to("cuda"), 1, 2)
        for count in (9, 9, 9, 9, 1):
            both.feed(count)
        assert far_layers(both.far)[0].dropped > 0
        no_wait = mock.patch.object(Event, "synchronize", lambda _: None)
        with no_wait, pytest.raises(AssertionError):
            both.feed(1)


def test_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_model("llama").config
    sizes = {"cuda": 1 << 40, "cpu": 1 << 27}
    monkeypatch.setattr(memory, "free_bytes", lambda device: sizes[device.type])
    each = 2 * 2 * 8 * 4
    with fake_cuda():
        cache = hf.TreeCache(config, **FAR)
        cache.reserve((1 << 29) // each)
        # Also if it is used again, as it is after the reset.
        for _ in range(3):
            with pytest.raises(
                torch.OutOfMemoryError, match=_no_memory(r"\S+ tokens", "2.0 GiB", 2)
            ):
                cache.update(*_rows(1), 0)
            cache.reset()
        # What torch keeps of memory that was page-locked is given back first.
        with mock.patch.object(
            torch._C, "_host_emptyCache", lambda: sizes.update({"cpu": 1 << 40})
        ):
            cache.update(*_rows(1), 0)
        sizes["cpu"] = 1 << 27
        layer = far_layers(hf.TreeCache(config, **FAR))[0]
        layer.update(*_rows(9000))
        sizes["cpu"] = 100
        monkeypatch.setattr(memory, "_LEAST_COMPARED", 0)
        with pytest.raises(torch.OutOfMemoryError, match=_no_memory("8,192 tokens", "2.0 MiB", 1)):
            layer.update(*_rows(9000))

        def none(*_: Any, **__: Any) -> Tensor:
            raise RuntimeError("CUDA error: out of memory")

        sizes["cpu"] = 1 << 40
        layer = far_layers(hf.TreeCache(config, **FAR))[0]
        layer.update(*_rows(9000))
        monkeypatch.setattr(far.torch, "empty", none)
        with pytest.raises(torch.OutOfMemoryError, match=r"8,192 tokens .* need 2.0 MiB"):
            layer.update(*_rows(9000))


def _no_memory(tokens: str, size: str, layers: int) -> str:
    return (
        rf"TreeCache: {tokens} on this rank need {size} of cpu \(\d+ bytes each in {layers} "
        r"layers?, 2 sequences\), and \S+ \wiB are free; take fewer tokens"
    )


@pytest.mark.parametrize(
    "options, error, says",
    [
        ({"far": "cuda"}, ValueError, "far must be None or 'cpu', got 'cuda'"),
        ({"far": True}, ValueError, "far must be None or 'cpu', got True"),
        ({"near_tokens": None}, ValueError, "far='cpu' needs near_tokens, .* got None"),
        ({"far": None}, ValueError, "near_tokens is for far='cpu', got near_tokens=6"),
        ({"near_tokens": 0}, ValueError, "near_tokens must be an integer of at least 1, got 0"),
        ({"near_tokens": -3}, ValueError, "near_tokens must be an integer of at least 1, got -3"),
        ({"near_tokens": 6.0}, TypeError, "near_tokens must be an integer of at least 1, got 6.0"),
        (
            {"near_tokens": True},
            TypeError,
            "near_tokens must be an integer of at least 1, got True",
        ),
        ({"near_tokens": "6"}, TypeError, "near_tokens must be an integer of at least 1, got '6'"),
        ({"max_length": 40}, ValueError, "far='cpu' is not supported with max_length, got 40"),
        ({"deterministic": 64}, ValueError, "deterministic.* is not supported with far='cpu'"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], says: str) -> None:
    model = make_model("llama")
    for call in (lambda **x: hf.TreeCache(model.config, **x), lambda **x: hf.enable(model, **x)):
        with pytest.raises(error, match=f"TreeCache: {says}"):
            call(**{**FAR, **options})


@pytest.mark.parametrize(
    "name, says",
    [
        ("deepseek", "far='cpu' is not supported with latents, as 'deepseek_v3' has"),
        ("DeepSeek-V3.2", "far='cpu' is not supported with an index that chooses keys, as 'deeps"),
        ("MiniMax-M3", "far='cpu' is not supported with an index that chooses keys, as 'minimax"),
        ("mistral_window", "'mistral' have a sliding window or a state, which stay on the device"),
    ],
)
def test_layers_without_far_keys(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hf.TreeCache(make(name).config, **FAR)


def test_a_model_on_the_cpu() -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"enable: far='cpu' .* keys on cpu; move it with"):
        hf.enable(model, **FAR)
    model.set_attn_implementation("tree_attention")
    cache = hf.TreeCache(model.config, **FAR)
    with pytest.raises(ValueError, match=r"TreeCache: far='cpu' .* keys on cpu"):
        model(torch.tensor([[5, 6]]), **{CACHE_NAME: cache})


def test_what_is_not_supported(tmp_path: Any) -> None:
    model = make_model("llama")
    with small_sizes():
        hf.enable(model.to("cuda"), **FAR)
        with pytest.raises(ValueError, match=r"with far='cpu' prefill must be 'auto' or 'replic"):
            hf.enable(model, prefill="split", **FAR)
        cache = new_cache(model)
        assert cache.kv_layers[0].keys is None
        model(torch.tensor([[5, 6, 7]], device="cuda"), **{CACHE_NAME: cache})
        for op, call in {
            "save": lambda: cache.save(tmp_path),
            "share": lambda: cache.share(2),
            "reshard": lambda: cache.reshard(BlockCyclic(1, 8)),
            "load": lambda: hf.TreeCache.load(tmp_path, model.config, **FAR),
        }.items():
            with pytest.raises(
                ValueError, match=rf"TreeCache.{op}: is not supported with far='cpu'"
            ):
                call()
        for name in ("keys", "values"):
            with pytest.raises(
                RuntimeError, match=f"the {name} of a layer with far='cpu' are part"
            ):
                getattr(cache.kv_layers[0], name)
        with (
            mock.patch.object(torch.compiler, "is_compiling", lambda: True),
            pytest.raises(ValueError, match="far='cpu' is not supported in a compiled forward"),
        ):
            cache.kv_layers[0].update(*_rows(1))


@on_ranks(2)
def test_ranks_of_which_one_has_no_far_keys(rank: int, world_size: int) -> None:
    model = make_model("llama")
    with small_sizes():
        hf.enable(model.to("cuda"), prefill="replicated", **FAR if rank else {})
        with pytest.raises(ExchangeError, match="whether keys may be far"):
            model.generate(**on_device(make_prompts()), **GREEDY)
        leave_device()


@on_ranks(2)
def test_a_cache_for_a_model_that_splits_prompts(rank: int, world_size: int) -> None:
    model = make_model("llama")
    with small_sizes():
        layout = BlockCyclic(world_size, 4)
        hf.enable(model.to("cuda"), prefill="split", layout=layout)
        with pytest.raises(ValueError, match="a TreeCache with far='cpu' needs a model that was"):
            model.generate(
                **on_device(make_prompts()), **GREEDY, **{CACHE_NAME: new_cache(model, world_size)}
            )
        leave_device()


@contextmanager
def rank_with(
    model: Any, prompts: dict[str, Tensor], *, is_on_gpu: bool
) -> Iterator[tuple[Any, dict[str, Tensor]]]:
    """The model and the prompts of a rank with a GPU, or of one without."""
    if not is_on_gpu:
        yield model, prompts
        return
    with small_sizes():
        model = model.to("cuda")
        model.tie_weights()  # which the fake device has untied
        yield model, on_device(prompts)


def generate_on_some_gpus(
    rank: int,
    world_size: int,
    name: str,
    case: str,
    gpus: tuple[int, ...],
    strategy: str,
    tokens: Tensor,
) -> None:
    both = make(name), long_prompts(world_size)
    with rank_with(*both, is_on_gpu=rank in gpus) as (model, prompts):
        comm, layout = Communicator(), BlockCyclic(world_size, 4)
        options: dict[str, Any] = {"strategy": strategy, "synchronize_logits": True, **FAR}
        hf.enable(model, comm, layout, **options)
        cache = hf.TreeCache(model.config, comm, layout, growth=4, strategy=strategy, **FAR)
        found = model.generate(**prompts, **CASES[case], **{CACHE_NAME: cache})
        assert found.device == model.device and torch.equal(found.cpu(), tokens)
        assert comm.bytes_sent > 0
        for layer in far_layers(cache):
            assert layer.device == model.device and (layer.dropped > 0) == (rank in gpus)
        # Another text in the same cache, which generate does not make.
        cache.reset()
        assert torch.equal(model.generate(**prompts, **CASES[case]).cpu(), tokens)


@pytest.mark.parametrize(
    "name, case, world_size, gpus, strategy",
    tiers(
        [("llama", "long", 2, (0,), "auto")],
        [
            ("gemma2", "chunks", 3, (1, 2), "two_phase"),
            ("llama", "beams", 2, (1,), "auto"),
            ("llama", "chunks", 3, (2,), "three_allreduce"),
            ("gpt_oss", "long", 2, (0,), "butterfly"),
        ],
    ),
)
def test_ranks_of_which_some_have_a_gpu(
    name: str, case: str, world_size: int, gpus: tuple[int, ...], strategy: str
) -> None:
    """Also layers with a window, whose states are of another call."""
    arguments = {key: x for key, x in CASES[case].items() if key != "prefill_chunk_size"}
    tokens = make(name).generate(**long_prompts(world_size), **arguments)
    run_ranks(generate_on_some_gpus, world_size, name, case, gpus, strategy, tokens)


@on_ranks(2)
def test_ranks_of_which_none_has_a_gpu(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"), **FAR)
    with pytest.raises(ValueError, match=r"generate: far='cpu' .* keys on cpu; move it with"):
        model.generate(**make_prompts(), **GREEDY)


@pytest.mark.parametrize(
    "strategy, do_sample, says",
    [
        ("one_shot", False, "one_shot is not available: tensors are on the cpu, not in the memory"),
        ("auto", True, r"kind of device \(CPUs and GPUs draw other random numbers\)"),
    ],
)
@on_ranks(2)
def test_refused_where_some_ranks_have_a_gpu(
    rank: int, world_size: int, strategy: str, do_sample: bool, says: str
) -> None:
    """On the rank with a GPU and on the one without."""
    with rank_with(make_model("llama"), make_prompts(), is_on_gpu=rank == 0) as (model, prompts):
        hf.enable(model, Communicator(), strategy=strategy, **FAR)
        with pytest.raises(ExchangeError, match=says):
            model.generate(**prompts, **GREEDY | {"do_sample": do_sample})
