# SPDX-License-Identifier: BSD-3-Clause
"""What callers do to models, caches and prompts: as with plain transformers, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import DynamicCache, PreTrainedModel

from hf_models import CONFIGS, EOS, PAD, VOCAB_SIZE, make_model
from tree_attention import BlockCyclic, hf, lean_decode, tree_decode
from tree_attention.hf import CACHE_NAME

from . import model as truth
from . import scalars
from .cases import Case, draw_layout
from .outcome import AMPLE, Outcome, attempt
from .places import Place, place

_NAMES = ("llama", "mistral", "mistral_window", "gemma2", "phi3", "qwen3_moe")
_TIE = 1e-3  # between the best two logits: either may be taken
# Of logits near 10, which a wrong key moves by a tenth and more; no caller sees keys of 8 bits.
_LIMITS = {None: 2e-3, "int8": 2.0}


def world_size(case: Case) -> int:
    return case.first.choice([1, 1, 2, 2, 3])


def play(case: Case, rank: int) -> str:
    with torch.no_grad():
        return case.draw(KINDS)(case.rng, place(world_size(case), rank))


def _enable(rng: Random, model: PreTrainedModel, here: Place) -> PreTrainedModel:
    # A forward that a caller put on the model cannot be split, and says so.
    splits = ["split"] if "forward" not in vars(model) else []
    options = {
        "layout": rng.choice([None, draw_layout(rng, here.world_size, 400)]),
        "prefill": rng.choice(["auto", "replicated", *splits]),
        "prefill_chunk_size": rng.choice([None, 2048]),
    }
    return hf.enable(model, here.comm, timeout=AMPLE, **options)


def _draw_ids(rng: Random, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=generator)


def _generate(model: PreTrainedModel, count: int, **arguments: Any) -> Outcome:
    return attempt(
        model.generate, max_new_tokens=count, min_new_tokens=count, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **arguments,
    )  # fmt: skip


def _check_tokens(found: Any, expected: Any, count: int) -> str:
    """Those of transformers, up to one where it has two that are as good as equal."""
    own, true = found.sequences, expected.sequences
    assert own.shape == true.shape, f"tokens of shape {own.shape}, not {true.shape}"
    for row, step in (own != true).nonzero().tolist():
        step -= true.shape[1] - count
        assert step >= 0, "another prompt than transformers'"
        logits = expected.logits[step][row].clone()
        logits[EOS] = -torch.inf
        best = logits.topk(2).values
        assert best[0] - best[1] < _TIE, f"other tokens from step {step} of row {row} on"
        return "a tie"
    return truth.bits(own)


class Patch:
    """A method of a caller's, which calls the one before it and changes something."""

    def __init__(self, name: str, style: str, shift: int) -> None:
        self.name, self.style, self.shift, self.calls = name, style, shift, 0
        self.put: Any = None  # what is on the model

    def apply(self, model: PreTrainedModel) -> None:
        """`style`: whether it calls what was there before or the class's method, and is bound."""
        name, previous = self.name, getattr(model, self.name)
        if "class" in self.style:
            previous = MethodType(getattr(type(model), name), model)

        def bound(this: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        def function(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if name == "generate":
                kwargs["repetition_penalty"] = 1.0 + self.shift / 10
            result = previous(*args, **kwargs)
            if name == "prepare_inputs_for_generation":
                result["input_ids"] = (result["input_ids"] + self.shift) % VOCAB_SIZE
            elif name == "forward":
                result.logits = result.logits.roll(self.shift, -1)
            return result

        self.put = MethodType(bound, model) if "bound" in self.style else function
        setattr(model, name, self.put)

    def __str__(self) -> str:
        return f"{self.name} ({self.style})"


_PATCHED = ("generate", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation",
            "_prepare_cache_for_generation", "forward", "get_compiled_call")  # fmt: skip


def patched(rng: Random, here: Place) -> str:
    """Methods on the model, from before and after `enable`: as transformers with the same ones."""
    name, count = rng.choice(_NAMES), 6
    model, plain = make_model(name), make_model(name)

    def draw(names: list[str]) -> list[tuple[str, str, int]]:
        return [
            (method, f"{rng.choice(['class', 'former'])}, {rng.choice(['bound', 'free'])}",
             rng.randint(1, 9))
            for method in names
        ]  # fmt: skip

    before = draw(rng.sample(_PATCHED, rng.choice([0, 1, 1, 2, 3])))
    after = draw(rng.sample(_PATCHED, rng.choice([0, 0, 1])))
    ids = _draw_ids(rng, rng.choice([1, 2]), rng.choice([3, 12, 70]))
    of_plain, of_model = ([Patch(*x) for x in before + after] for _ in range(2))
    for patch in of_plain:
        patch.apply(plain)
    expected = _generate(plain, count, inputs=ids).result()
    for patch in of_model[: len(before)]:
        patch.apply(model)
    _enable(rng, model, here)
    for patch in of_model[len(before) :]:
        patch.apply(model)
    how = f"before enable {list(map(str, of_model[: len(before)]))}, after it " + str(
        list(map(str, of_model[len(before) :]))
    )
    try:
        outcome = _generate(model, count, inputs=ids)
        goes_around = any("class" in style for _, style, _ in after)
        if outcome.error is not None and goes_around:
            said = outcome.refusal(("generate", "enable", *_PATCHED, "TreeCache"))
        else:
            said = _check_tokens(outcome.result(), expected, count)
            for own, true in zip(of_model, of_plain, strict=True):
                is_counted = own.name not in ("forward", "get_compiled_call")
                assert own.calls == true.calls or not is_counted, (
                    f"{own} was called {own.calls} times, not {true.calls}"
                )
        hf.disable(model)
        last = {patch.name: patch for patch in of_model}
        for method in _PATCHED:
            kept = vars(model).get(method)
            put = last[method].put if method in last else None
            assert kept is put, f"after disable, {method} of the model is {kept}"
        _check_tokens(_generate(model, count, inputs=ids).result(), expected, count)
    except AssertionError as error:
        raise AssertionError(f"{name}, {how}: {error}") from error
    here.probe()
    return said


def _kept(x: Tensor, step: int) -> Tensor:
    return x[:, :, ::step]


def _replace_both(layer: Any, number: int) -> None:
    layer.keys, layer.values = _kept(layer.keys, number + 2), _kept(layer.values, number + 2)


def _assign(layer: Any, number: int) -> None:
    layer.keys = layer.keys * (number + 1.5)


def _assign_values(layer: Any, number: int) -> None:
    layer.values = layer.values.flip(2)


def _zero_a_row(layer: Any, number: int) -> None:
    layer.keys[:, :, -1 - number % layer.keys.shape[2]] = 0.0


def _scale(layer: Any, number: int) -> None:
    layer.values.mul_(number + 1.5)


def _scale_through_a_view(layer: Any, number: int) -> None:
    layer.keys.transpose(1, 2)[:, -1].mul_(-1.0)


def _set_data(layer: Any, number: int) -> None:
    layer.keys.data = layer.keys.flip(2)


def _set_storage(layer: Any, number: int) -> None:
    layer.values.set_(layer.values.flip(2).contiguous())


_WRITES: dict[str, Callable[[Any, int], None]] = {
    f.__name__.strip("_"): f
    for f in (
        _replace_both, _replace_both, _assign, _assign_values, _zero_a_row, _scale,
        _scale_through_a_view, _set_data, _set_storage,
    )
}  # fmt: skip


def replaced(rng: Random, here: Place) -> str:
    """Keys and values written into the layers: as DynamicCache does, or refused before a token."""
    name = rng.choice(_NAMES)
    model, plain = make_model(name), make_model(name)
    ids = _draw_ids(rng, rng.choice([1, 2]), rng.choice([3, 7, 20, 70]))
    _enable(rng, model, here)
    options = {
        "max_length": rng.choice([None, 100]),
        "kv_dtype": rng.choice([None, None, None, "int8"]),
        "growth": rng.choice([1, 64, 1024]),
    }
    cache = hf.TreeCache(model.config, here.comm, timeout=AMPLE, **options)
    theirs = DynamicCache(config=plain.config)
    for each, held in ((model, cache), (plain, theirs)):
        each(ids, **{CACHE_NAME: held})
    write = rng.choice(list(_WRITES))
    layer, number = rng.randrange(len(cache.layers)), rng.randrange(3)
    changes_all = "replace" in write
    layers = range(len(cache.layers)) if changes_all else [layer]
    following = _draw_ids(rng, len(ids), 1)
    step = {"position_ids": torch.full((len(ids), 1), ids.shape[1])}
    names = ("TreeCache", "keys", "values", "cache")
    how = f"{write} in {name}, world {here.world_size}, {options}"
    try:
        writes = [attempt(_WRITES[write], cache.layers[i], number) for i in layers]
        for i, outcome in zip(layers, writes, strict=True):
            if outcome.error is None:
                _WRITES[write](theirs.layers[i], number)
            else:
                outcome.refusal(names)
        found = attempt(model, following, **{CACHE_NAME: cache}, **step)
        if found.error is None:
            expected = plain(following, **{CACHE_NAME: theirs}, **step).logits
            limit = _LIMITS[options["kv_dtype"]]
            error = (found.value.logits - expected).abs().max().item()
            assert error < limit, f"logits are off by {error:.3g}"
            said = "right"
        else:
            said = found.refusal(names)
            cache.reset()
            _check_logits(model, plain, cache, ids, options)
    except AssertionError as error:
        raise AssertionError(f"{how}: {error}") from error
    here.probe()
    return said


def _check_logits(
    model: PreTrainedModel, plain: PreTrainedModel, cache: Any, ids: Tensor, options: Any
) -> None:
    found = attempt(model, ids, **{CACHE_NAME: cache}).result().logits[:, -1]
    error = (found - plain(ids).logits[:, -1]).abs().max().item()
    limit = _LIMITS[options["kv_dtype"]]
    assert error < limit, f"after reset, logits are off by {error:.3g}"


def holes(rng: Random, here: Place) -> str:
    """Masks with a hole: transformers' tokens, or a sentence that names the row."""
    name, count = rng.choice(("llama", "mistral_window", "gemma2")), 5
    model, plain = make_model(name), make_model(name)
    batch, length = rng.choice([1, 2, 3]), rng.choice([4, 20, 70])
    ids = _draw_ids(rng, batch, length)
    mask = torch.ones_like(ids)
    rows = sorted(rng.sample(range(batch), rng.randint(1, batch)))
    for row in range(batch):
        padding = rng.choice([0, 0, rng.randrange(length - 2)])
        if row in rows:
            begin = rng.randrange(padding + 1, length)
            end = rng.choice([length, rng.randint(begin + 1, length)])
            mask[row, begin:end] = 0
        mask[row, :padding] = 0
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if rng.random() < 0.3:  # then transformers makes the mask
        ids[mask == 0] = PAD
        del arguments["attention_mask"]
    _enable(rng, model, here)
    outcome = _generate(model, count, **arguments)
    how = f"{name}, rows {rows} of {mask.tolist()}, {list(arguments)}"
    try:
        if outcome.error is None:
            expected = _generate(plain, count, **arguments).result()
            return _check_tokens(outcome.value, expected, count)
        text = outcome.refusal(("row", "rows"))
        named = [int(number) for number in re.findall(r"\brows? (\d+)", text)]
        assert set(named) & set(rows), f"it names none of the rows {rows}: {text}"
    except AssertionError as error:
        raise AssertionError(f"{how}: {error}"[:1500]) from error
    here.probe()
    return text


def embeddings(rng: Random, here: Place) -> str:
    """Prompts that are embeddings, or begin with some, of which tokens are a part or none."""
    name, count = rng.choice(_NAMES), 5
    model, plain = make_model(name), make_model(name)
    length = rng.choice([3, 20, 70])
    more = rng.choice([0, 1, 5])
    ids = _draw_ids(rng, 1, length)
    torch.manual_seed(rng.getrandbits(31))
    whole = torch.cat([0.5 * torch.randn(1, more, 64), plain.get_input_embeddings()(ids)], 1)
    arguments: dict[str, Any] = {"inputs_embeds": whole}
    if rng.random() < 0.7:
        arguments["attention_mask"] = torch.ones(1, length + more, dtype=torch.long)
    if rng.random() < 0.7:
        arguments["input_ids"] = ids
    _enable(rng, model, here)
    expected = _generate(plain, count, **arguments)
    outcome = _generate(model, count, **arguments)
    if expected.error is not None:
        outcome.refusal(("generate", "inputs_embeds", "input_ids", "attention_mask", "must"))
        return "transformers refuses it"
    try:
        return _check_tokens(outcome.result(), expected.value, count)
    except AssertionError as error:
        raise AssertionError(f"{name}, {more} more than ids, {list(arguments)}: {error}") from error


def second_turn(rng: Random, here: Place) -> str:
    """A turn of new tokens only, with their positions, in chunks of any size: as transformers."""
    name, count = rng.choice(_NAMES), 4
    model, plain = make_model(name), make_model(name)
    first, new = (_draw_ids(rng, 1, rng.choice([2, 9, 40, 90])) for _ in range(2))
    _enable(rng, model, here)
    cache = hf.TreeCache(model.config, here.comm, timeout=AMPLE)
    theirs = DynamicCache(config=plain.config)
    for each, held in ((model, cache), (plain, theirs)):
        each(first, **{CACHE_NAME: held})
    end = first.shape[1] + new.shape[1]
    more: dict[str, Any] = {"attention_mask": torch.ones(1, end, dtype=torch.long)}
    if rng.random() < 0.7:
        more["position_ids"] = torch.arange(first.shape[1], end)[None]
    chunk: dict[str, Any] = {}
    if rng.random() < 0.8:
        chunk["prefill_chunk_size"] = rng.choice([1, 4, 16, 50])
    given = torch.cat([first, new], 1) if rng.random() < 0.3 else new
    outcome = _generate(model, count, input_ids=given, **{CACHE_NAME: cache}, **more, **chunk)
    expected = _generate(plain, count, input_ids=given, **{CACHE_NAME: theirs}, **more)
    how = f"{name}, {first.shape[1]} tokens and {new.shape[1]}, given {list(more)} {chunk}"
    if expected.error is not None:
        return "transformers refuses it"
    try:
        if outcome.error is not None:
            return outcome.refusal(("generate", "position_ids", "prefill_chunk_size"))
        return _check_tokens(outcome.value, expected.value, count)
    except AssertionError as error:
        raise AssertionError(f"{how}: {error}") from error


def fewer_layers(rng: Random, here: Place) -> str:
    """A model that was cut after it was loaded."""
    name, count = rng.choice(("llama", "gemma2", "mistral_window", "gpt_oss", "qwen3_moe")), 4
    models = [make_model(name) for _ in range(2)]
    for each in models:
        each.model.layers = each.model.layers[:1]
        each.config.num_hidden_layers = 1
    ids = _draw_ids(rng, rng.choice([1, 2]), rng.choice([3, 20]))
    _enable(rng, models[0], here)
    found, expected = (_generate(each, count, input_ids=ids).result() for each in models)
    return _check_tokens(found, expected, count)


def foreign(rng: Random, here: Place) -> str:
    """Weights and inputs that somebody else has split: refused by a sentence that says so."""
    mesh = DeviceMesh.from_group(here.group, "cpu")
    torch.manual_seed(rng.getrandbits(31))
    what = rng.choice(["weights", "inputs", "mesh", "jagged"])
    placement = rng.choice([Replicate(), Shard(0)])
    if what == "weights":
        model = make_model(rng.choice(_NAMES))
        names = [name for name, x in model.named_parameters() if "proj" in name and x.dim() == 2]
        for name in rng.sample(names, rng.choice([1, 3, len(names)])):
            owner = model.get_submodule(name.rpartition(".")[0])
            weight = distribute_tensor(owner.weight.data, mesh, [placement])
            owner.weight = torch.nn.Parameter(weight, requires_grad=False)
        outcome = attempt(hf.enable, model, here.comm)
        if outcome.error is None:
            outcome = attempt(model.generate, _draw_ids(rng, 1, 5), max_new_tokens=2)
        said = outcome.refusal(("DTensor", "split"))
    elif what == "mesh":
        outcome = attempt(tree_decode, torch.ones(1, 2, 1, 8), *torch.ones(2, 1, 2, 4, 8),
                          group=mesh)  # fmt: skip
        said = outcome.refusal(("get_group",))
    else:
        tensors = {name: torch.randn(2, 2, 4, 8) for name in ("q", "k", "v")}
        chosen = rng.choice(list(tensors))
        if what == "inputs":
            tensors[chosen] = distribute_tensor(tensors[chosen], mesh, [placement])
        else:
            tensors[chosen] = torch.nested.nested_tensor(
                [torch.randn(n, 4, 8) for n in (2, 3)], layout=torch.jagged
            )
        decode = rng.choice([lean_decode, tree_decode])
        more = {} if decode is lean_decode else {"group": here.comm}
        outcome = attempt(decode, *tensors.values(), **more)
        said = outcome.refusal((chosen, "DTensor", "to_local", "nested", "jagged"))
        assert isinstance(outcome.error, ValueError | TypeError), said
        assert re.search(
            "to_local|DTensor" if what == "inputs" else "jagged|nested|padded", said
        ), f"the way on is not named: {said[:300]}"
    here.probe()
    return type(outcome.error).__name__


def _cache_with(number: Any, name: str, here: Place) -> Callable[[], Any]:
    cache = hf.TreeCache(CONFIGS["llama"], here.comm, timeout=AMPLE, **{name: number})

    def use() -> Any:
        torch.manual_seed(1)
        for layer_idx in range(2):
            cache.update(*torch.randn(2, 1, 2, 9, 8), layer_idx)
        return int(cache.get_seq_length()), cache.max_length, [x.num_bytes for x in cache.layers]

    return use


def _changed(number: Any, here: Place, change: Callable[[Any, Any], None]) -> Callable[[], Any]:
    cache = hf.TreeCache(CONFIGS["llama"], here.comm, BlockCyclic(here.world_size, 2))
    torch.manual_seed(1)
    for layer_idx in range(2):
        cache.update(*torch.randn(2, 1, 2, 9, 8), layer_idx)
    change(cache, number)

    def use() -> Any:
        held = [layer.buffers()["keys"][:, :, layer.held()] for layer in cache.layers]
        return int(cache.get_seq_length()), repr(cache.shard.layout), truth.bits(*held)

    return use


def _chunked(number: Any, here: Place) -> Callable[[], Any]:
    model = hf.enable(make_model("llama"), here.comm, prefill_chunk_size=number)
    ids = torch.arange(3, 60)[None]
    return lambda: truth.bits(model.generate(ids, max_new_tokens=3, do_sample=False))


NUMBERS = {
    "max_length": scalars.Argument(
        ("max_length",), (20, 100), lambda n, here: _cache_with(n, "max_length", here)
    ),
    "growth": scalars.Argument(
        ("growth",), (1, 5, 64), lambda n, here: _cache_with(n, "growth", here)
    ),
    "crop": scalars.Argument(
        ("crop",), (-1, -4, 0), lambda n, here: _changed(n, here, lambda c, n: c.crop(n))
    ),
    "repeats": scalars.Argument(
        ("batch_repeat_interleave", "repeats"),
        (1, 3),
        lambda n, here: _changed(n, here, lambda c, n: c.batch_repeat_interleave(n)),
    ),
    "reshard": scalars.Argument(
        ("BlockCyclic", "block"),
        (1, 3, 64),
        lambda n, here: _changed(n, here, lambda c, n: c.reshard(BlockCyclic(here.world_size, n))),
    ),
    "prefill_chunk_size": scalars.Argument(("prefill_chunk_size",), (1, 8, 50), _chunked),
}


def numbers(rng: Random, here: Place) -> str:
    return scalars.play_of(NUMBERS, rng, here)


KINDS: dict[str, tuple[float, Callable[[Random, Place], str]]] = {
    "patched": (3, patched),
    "replaced": (3, replaced),
    "holes": (2, holes),
    "embeddings": (1, embeddings),
    "second_turn": (1, second_turn),
    "fewer_layers": (0.3, fewer_layers),
    "foreign": (1.5, foreign),
    "numbers": (1.5, numbers),
}
