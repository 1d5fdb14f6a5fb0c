# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that a rank keeps and sends, and seconds that it takes, as docs/parallelism.md says.

Times come from bandwidths, arithmetic at a share of its peak, and rounds of messages; of measured
machines also from what a layer takes beyond these. Nothing overlaps and nobody waits, but for keys
in the host's memory, to which the host attends while the GPU attends to its own.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from .._numbers import in_digits, integer
from ..shares import EQUAL, ModelShares, Shares, pays_to_gather
from .machines import BUS_SECONDS, HOST, SUSTAINED, Hosts, Machine
from .models import BF16, Attention, Model

# Forms, by what is split. T is tensor_parallel_size: 1, or as large as the KV heads allow.
WHOLE, PROMPTS = "cache", "cache and prompts"
SPLIT, SPLIT_BY_HEADS = "cache and weights, T = 1", "cache and weights, largest T"
FORMS = (WHOLE, PROMPTS, SPLIT, SPLIT_BY_HEADS)
# Others' forms: weights and cache are split by heads only; a whole model on each rank.
TENSOR, DATA = "tensor parallel", "data parallel"
ALL_FORMS = (*FORMS, TENSOR, DATA)
MAX_CONTEXT, MAX_RANKS = 1 << 26, 1 << 14
# The part of a layer's small operations that comes before the merge of states: of the layer that
# `measuring` times, about 27 of 42 operations.
_SMALL_BEFORE_MERGE = 2 / 3
_CONTEXTS = range(MAX_CONTEXT + 1)


@dataclass(frozen=True)
class Work:
    """Prompts and new tokens of all ranks together."""

    context: int  # tokens of a prompt, and in the cache when a token is timed
    sequences: int = 1  # that get a new token at once; their prompts come one after another
    chunk: int = 2048  # tokens of a prompt in a forward pass, as hf.enable has them

    def __post_init__(self) -> None:
        for name, least in (("context", 0), ("sequences", 1), ("chunk", 1)):
            object.__setattr__(self, name, integer("Work", name, getattr(self, name), least))


@dataclass(frozen=True)
class Seconds:
    """Time of a token or of a prompt, by where it goes.

    Attention and products are reading memory or arithmetic, whichever takes longer, and layers' own
    times. Where matrices are split, ranks wait for each other between the two.
    """

    attention: float  # and what comes before it in a layer; all, if no other rank waits for it
    products: float  # with split matrices, of which those of queries come before attention
    exchange: float

    @property
    def local(self) -> float:
        return self.attention + self.products

    @property
    def total(self) -> float:
        return self.local + self.exchange


@dataclass(frozen=True)
class FarStep:
    """Time and bytes of keys in the host's memory in one new token of every sequence."""

    near: float  # seconds in which the GPU attends to its keys, in layers that have far ones
    far: float  # seconds in which the host attends to its own
    bus: float  # seconds in which queries go to the host, and states come back
    bus_bytes: float
    merge: float  # seconds in which the GPU makes one state of two
    key_bytes: float  # of near and far keys, in layers that have far ones

    @property
    def waiting(self) -> float:
        """Seconds in which the GPU has nothing to do."""
        return max(0.0, self.far + self.bus - self.near)


def to_owners(num_bytes: float, parts: float) -> float:
    """Bytes that a rank sends if it cuts `num_bytes` into `parts` slices and keeps one of them."""
    return num_bytes if parts == math.inf else (parts - 1) * num_bytes / parts


def sum_phases(num_bytes: float) -> int:
    """Rounds of an all_reduce: slices go to their owners and back above 64 KiB."""
    return 1 if num_bytes <= 64 << 10 else 2


def sum_bytes(num_bytes: float, p: int) -> float:
    """Bytes that a rank sends in an all_reduce."""
    return (p - 1) * num_bytes if sum_phases(num_bytes) == 1 else 2 * to_owners(num_bytes, p)


@dataclass(frozen=True)
class Split:
    """A model in one form over `p` ranks, and their work.

    With `shares`, sizes and times are of the rank `rank`. Without, they are equal on all ranks.
    """

    model: Model
    form: str
    p: int
    work: Work
    shares: ModelShares = EQUAL
    rank: int = 0
    size: int | None = None  # tensor_parallel_size, if the form does not say it

    @property
    def has_split_weights(self) -> bool:
        return self.form in (SPLIT, SPLIT_BY_HEADS, TENSOR)

    def _parts_of(self, count: int, shares: Shares, index: int) -> float:
        """As how many parts of this rank's size `count` ranks split something: infinitely many
        where it has none."""
        if shares is None or self.form == TENSOR:
            return count
        return sum(shares) / shares[index] if shares[index] else math.inf

    @property
    def _parts(self) -> float:
        """Number of ranks that split the weights: 1 if every rank has all of them."""
        if not self.has_split_weights:
            return 1
        return self._parts_of(self.p, self.shares.weights, self.rank)

    @property
    def _parts_of_cache(self) -> float:
        """Number of ranks that split the slots of the cache."""
        size = self.tensor_parallel_size
        return self._parts_of(self.p // size, self.shares.cache, self.rank // size)

    @property
    def _parts_of_prompt(self) -> tuple[float, float]:
        """Number of ranks that split the tokens of a prompt, by this rank's size and by the size of
        the largest part."""
        if self.form != PROMPTS:
            return 1, 1
        shares = self.shares.prompt
        largest = self.p if shares is None else sum(shares) / max(shares)
        return self._parts_of(self.p, shares, self.rank), largest

    @property
    def tensor_parallel_size(self) -> int:
        if self.size is not None:
            return self.size
        heads = {SPLIT_BY_HEADS: self.model.cut_heads, TENSOR: self.model.kv_heads}
        return math.gcd(self.p, heads.get(self.form, 1))

    @property
    def obstacle(self) -> str:
        """Reason why the ranks cannot take this form, in a word, or nothing."""
        model, p = self.model, self.p
        split = model.not_split
        if p > 1 and {PROMPTS: model.prompts_not_split, SPLIT: split, SPLIT_BY_HEADS: split}.get(
            self.form
        ):
            return "refused"  # by `hf`; the model says why
        divides = p % model.kv_heads == 0 or model.kv_heads % p == 0
        # Each rank gets whole heads, and every rank gets equally many.
        if self.form == TENSOR and not (divides and all(x.heads % p == 0 for x in model.attention)):
            return "uneven"
        return ""

    @property
    def _gathers_queries(self) -> bool:
        """True where the ranks of a context group make a part each of the queries."""
        size, layers = self.tensor_parallel_size, sum(x.layers for x in self.model.attention)
        if layers == 0 or self.form not in (SPLIT, SPLIT_BY_HEADS):
            return False
        return pays_to_gather(self.model.weights.queries // (size * layers), self.p // size)

    @property
    def _projections(self) -> float:
        """Number of a rank's weights that make q, k and v and are not split."""
        weights, size = self.model.weights, self.tensor_parallel_size
        # A context group has copies of these; other engines split q over all ranks.
        queries = weights.q - weights.queries * self._gathers_queries
        return queries / (self.p if self.form == TENSOR else size) + weights.kv / size

    @property
    def _split_matrices(self) -> float:
        """Number of the weights in matrices that all ranks split, without head and experts."""
        return self.model.weights.split + self.model.weights.queries * self._gathers_queries

    @property
    def _others(self) -> float:
        """Number of a rank's other weights in layers that are not split, but by other engines."""
        weights = self.model.weights
        return weights.whole / (self.p if self.form == TENSOR else 1) + weights.vectors

    @property
    def weights_bytes(self) -> float:
        weights = self.model.weights
        split = weights.matrix_itemsize * self._split_matrices
        split += weights.expert_itemsize * weights.experts
        split += weights.itemsize * (weights.head + weights.embedding)
        copied = weights.matrix_itemsize * self._projections
        copied += weights.itemsize * (self._others + weights.tables)
        return copied + split / self._parts

    @property
    def _sums(self) -> int:
        """Number of activations that ranks add up in a forward pass, without the embedding."""
        if self.form == TENSOR:
            return 2 * self.model.layers
        return self.has_split_weights * self.model.sums

    @property
    def _copied_share(self) -> float:
        """The part that a rank has of what all ranks of a tensor group have alike."""
        size = self.tensor_parallel_size
        return 1 / (size if self.form == TENSOR else self._parts_of_cache)

    def _row_share(self, layers: Attention) -> float:
        """The part that a rank has of all keys and values, or of latents, which are alike."""
        if layers.latent or self.form == TENSOR:
            return self._copied_share
        return 1 / (self._parts_of_cache * self.tensor_parallel_size)

    def _far_tokens(self, layers: Attention, context: int) -> int:
        """The number of a sequence's tokens whose keys are on the host; layers with a window, and
        other engines, have none there."""
        near = self.model.near_tokens
        if near is None or layers.window is not None or self.form == TENSOR:
            return 0
        return max(0, context - near)

    def _far_bytes(self, layers: Attention, context: int) -> float:
        """Bytes that a rank keeps of a sequence on the host."""
        rows = self._far_tokens(layers, context) * layers.token_bytes(self.model.kv_dtype)
        return layers.layers * self._row_share(layers) * rows

    def _kept_bytes(self, layers: Attention, attended: int | None = None) -> float:
        """Bytes that a rank keeps of a sequence's tokens, but for far ones: keys and values, or
        latents, and the keys of an index. With `attended`, the bytes that a new token reads if it
        attends to so many."""
        seen = layers.seen(self.work.context)
        rows = layers.token_bytes(self.model.kv_dtype) - layers.index_bytes
        rows *= seen if attended is None else attended
        kept = self._row_share(layers) * rows + self._copied_share * layers.index_bytes * seen
        return layers.layers * kept - self._far_bytes(layers, self.work.context)

    @property
    def _states_bytes(self) -> float:
        """All ranks have the same states; other engines split them as the weights of layers."""
        copies = self.p if self.form == TENSOR else 1
        return self.work.sequences * self.model.states_bytes / copies

    @property
    def cache_bytes(self) -> float:
        """Bytes that a rank keeps of all sequences, states with them."""
        kept = sum(self._kept_bytes(layers) for layers in self.model.attention)
        return self._states_bytes + self.work.sequences * kept

    @property
    def host_bytes(self) -> float:
        """Bytes that a rank keeps of all sequences in the host's memory."""
        context = self.work.context
        return self.work.sequences * sum(self._far_bytes(x, context) for x in self.model.attention)

    @property
    def held_bytes(self) -> float:
        return self.weights_bytes + self.cache_bytes

    def _merge_bytes(self, states: float) -> float:
        """Bytes that a rank with split weights sends to merge the heads that it goes on with."""
        if self.form == TENSOR:
            return 0.0
        return to_owners(states / self.tensor_parallel_size, self._parts_of_cache)

    @property
    def token_bytes(self) -> float:
        """Bytes that a rank sends for a new token of every sequence: merges, sums and logits."""
        model, sequences, p = self.model, self.work.sequences, self.p
        states = sequences * sum(x.layers * x.state_bytes(x.step[1]) for x in model.attention)
        choices = sequences * self._choice_bytes
        if not self.has_split_weights:
            return (p - 1) * states + choices
        # One sum more follows the embedding.
        sums = (self._sums + 1) * sum_bytes(sequences * model.hidden * BF16, p)
        logits = (p - 1) * sequences * model.vocab * BF16 / self._parts
        return self._merge_bytes(states) + sums + logits + choices + sequences * self._query_bytes

    @property
    def _query_bytes(self) -> float:
        """Bytes that a rank sends of the queries of one token, which ranks gather."""
        if not self._gathers_queries:
            return 0.0
        others = self.p // self.tensor_parallel_size - 1
        columns = sum(x.layers * x.heads * x.key for x in self.model.attention)
        return others * columns * BF16 / self._parts

    @property
    def _choice_bytes(self) -> float:
        """Bytes that a rank sends for the choices of one token's keys."""
        others = 0 if self.form == TENSOR else self.p // self.tensor_parallel_size - 1
        context = self.work.context
        return others * sum(x.layers * x.choice_bytes(context) for x in self.model.attention)

    @property
    def _exchanges(self) -> int:
        """The number of exchanges for attention in a forward pass, of queries, states, choices."""
        each = 1 + self._gathers_queries
        context = self.work.context
        return sum(x.layers * (each + x.chooses(context)) for x in self.model.attention)

    def token_seconds(self, hosts: Hosts) -> Seconds:
        """Time of one new token of every sequence, after `work.context` tokens."""
        model, weights, sequences = self.model, self.model.weights, self.work.sequences
        machine, context = hosts.machine, self.work.context
        weights_bandwidth = machine.weights_bandwidth or machine.memory_bandwidth
        keys = sequences * sum(self._kept_bytes(x, x.attended(context)) for x in model.attention)
        of_keys = -machine.operations_with_a_byte * keys
        for x in model.attention:
            of_keys += self._products(x, x.attended(context) - self._far_tokens(x, context))
            of_keys += sequences * x.layers * x.scored(context) * self._copied_share
        copied = weights.matrix_itemsize * self._projections + weights.itemsize * self._others
        # States are written as well. No softmax comes with them, as with no weights.
        others = copied + 2 * self._states_bytes
        attention = (
            keys / machine.memory_bandwidth + others / weights_bandwidth,
            2 * sequences * (self._projections + self._others) + max(0.0, of_keys),
        )
        head, experts = weights.head / self._parts, weights.experts / self._parts
        split = self._split_matrices / self._parts
        read = weights.matrix_itemsize * split + weights.itemsize * head
        read += weights.expert_itemsize * experts * weights.share_of_experts(sequences)
        active = split + head + experts * weights.chosen / weights.num_experts
        products = read / weights_bandwidth, 2 * sequences * active
        merges = self.form != TENSOR and self.tensor_parallel_size < self.p
        rounds = merges * self._exchanges
        phases = sum_phases(sequences * model.hidden * BF16)
        rounds += self.has_split_weights * (phases * (self._sums + 1) + 1)
        seconds = self._seconds(hosts, attention, products, rounds, self.token_bytes)
        step, small = self.far_step(machine), model.layers * machine.layer_seconds
        before = _SMALL_BEFORE_MERGE * small if self.has_split_weights else small
        return replace(
            seconds,
            attention=seconds.attention + before + step.waiting + step.merge,
            products=seconds.products + small - before,
        )

    def _products(self, layers: Attention, keys: int) -> float:
        """Operations of a rank for so many keys of all ranks, in a new token of every sequence."""
        heads = layers.heads / (self._parts_of_cache * self.tensor_parallel_size)
        return 2 * self.work.sequences * layers.layers * keys * heads * sum(layers.step)

    def far_step(self, machine: Machine) -> FarStep:
        """The time of keys on the host, in one new token of every sequence."""
        context, sequences = self.work.context, self.work.sequences
        near = far = sent = states = keys = 0.0
        layers = 0
        for x in self.model.attention:
            tokens = self._far_tokens(x, context)
            if tokens == 0:
                continue
            for_near = self._products(x, context - tokens), sequences * self._kept_bytes(x)
            for_far = self._products(x, tokens), sequences * self._far_bytes(x, context)
            near += _attending(machine, *for_near)
            far += _attending(HOST, *for_far)
            keys += for_near[1] + for_far[1]
            rows = sequences * x.layers / self.tensor_parallel_size
            sent += rows * BF16 * x.heads * x.key
            states += rows * x.state_bytes(x.value)
            layers += x.layers
        if layers == 0:
            return FarStep(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        bus = BUS_SECONDS * layers + (sent + states) / machine.bus
        merge = 3 * states / machine.memory_bandwidth
        return FarStep(near, far, bus, sent + states, merge, keys)

    def _chunk_bytes(self, layers: Attention, begin: int, tokens: int) -> float:
        """Bytes that a rank sends in a layer for a chunk of a prompt after `begin` tokens."""
        states = tokens * layers.state_bytes(layers.value)
        if self.has_split_weights:
            return self._merge_bytes(states)
        if self.form == WHOLE:
            return 2 * to_owners(states, self.p)
        # The cheaper way: all queries and the states of them, or all keys and values.
        queries = tokens * BF16 * layers.heads * layers.key
        keys = (layers.seen(begin) + tokens) * layers.token_bytes(self.model.kv_dtype)
        if layers.index is not None and begin + tokens > layers.index.topk:
            return to_owners(keys, self.p)  # each rank chooses for its own tokens, of all keys
        return to_owners(min(queries + states, keys), self.p)

    def prefill_seconds(self, hosts: Hosts) -> Seconds:
        """Time of all sequences' prompts, of `work.context` tokens each, in chunks."""
        model, context, weights = self.model, self.work.context, self.model.weights
        # Each rank takes its part of a chunk. The largest part has the size of a chunk of one rank.
        parts, most = self._parts_of_prompt
        size = int(most * self.work.chunk)
        chunks = [(begin, min(size, context - begin)) for begin in range(0, context, size)]
        experts = weights.experts * weights.chosen / weights.num_experts
        products = 2 * (self._split_matrices + experts) / self._parts * context / parts
        sent = self._sums * sum(sum_bytes(n * model.hidden * BF16, self.p) for _, n in chunks)
        operations = 2 * (self._projections + self._others) * context / parts
        for x in model.attention:
            # Chosen keys differ by query, so that latents stay as they are.
            columns = sum(x.step) if x.chooses(context) else x.key + x.value
            attention = 2 * x.heads * columns * x.pairs(context)
            # For every chunk each rank makes keys and values from the latents of its slots again.
            expanded = 0 if x.chooses(context) else sum(x.seen(begin) + n for begin, n in chunks)
            own = self._parts_of_cache * self.tensor_parallel_size
            operations += x.layers * (attention + x.expansion * expanded) / own
            # A token sees half of the context on average.
            operations += x.layers * context / 2 * x.scored(context) * self._copied_share
            sent += x.layers * sum(self._chunk_bytes(x, *chunk) for chunk in chunks)
        if self.form != PROMPTS:
            sent += context * (self._choice_bytes + self._query_bytes)
        # At most: a sum has two phases.
        merges = 1 if self.has_split_weights else 2
        rounds = len(chunks) * (merges * self._exchanges + 2 * self._sums)
        seconds = self._seconds(hosts, (0.0, operations), (0.0, products), rounds, sent)
        attention = seconds.attention
        if model.near_tokens is not None:  # so many queries need far keys on the GPU
            read = sum(self._far_bytes(x, begin) for x in model.attention for begin, _ in chunks)
            attention += read / hosts.machine.bus
        sequences = self.work.sequences
        return Seconds(
            sequences * attention, sequences * seconds.products, sequences * seconds.exchange
        )

    def _seconds(
        self,
        hosts: Hosts,
        attention: tuple[float, float],
        products: tuple[float, float],
        rounds: int,
        sent: float,
    ) -> Seconds:
        """Time of attention and of products, each given by the seconds of reading and the
        operations."""
        if self.p == 1 or not self.has_split_weights:  # nobody waits between the two
            attention, products = (attention[0] + products[0], attention[1] + products[1]), (0, 0)
        rate = SUSTAINED * hosts.machine.arithmetic
        before, after = (max(reading, flop / rate) for reading, flop in (attention, products))
        exchange = rounds * hosts.link.round_seconds + sent / hosts.link.bandwidth
        return Seconds(before, after, exchange if self.p > 1 else 0.0)


def _attending(machine: Machine, operations: float, num_bytes: float) -> float:
    """Seconds of attention of a new token, in a machine that does nothing else."""
    return max(num_bytes / machine.memory_bandwidth, operations / (SUSTAINED * machine.arithmetic))


@dataclass(frozen=True)
class Plan:
    """A model on equal ranks, and their work."""

    model: Model
    hosts: Hosts
    ranks: int
    work: Work

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", integer("Plan", "ranks", self.ranks, 1))

    def split(self, form: str, context: int | None = None) -> Split:
        work = replace(self.work, context=self.work.context if context is None else context)
        if form != DATA:
            return Split(self.model, form, self.ranks, work)
        most = -(-work.sequences // self.ranks)
        return Split(self._without_far_keys, WHOLE, 1, replace(work, sequences=most))

    def refusal(self, form: str) -> str:
        """Reason why the ranks cannot take this form, in few words, or nothing."""
        return self.split(form).obstacle or "no room" * (not self._fits(form))

    def _fits(self, form: str, context: int | None = None) -> bool:
        split = self.split(form, context)
        return split.held_bytes <= self.hosts.machine.memory and split.host_bytes <= HOST.memory

    def best(self) -> str | None:
        """The form with the least time per token; of equal ones, that with the fastest prompt."""
        able = [form for form in ALL_FORMS if not self.refusal(form)]
        prefill = {form: self.split(form).prefill_seconds(self.hosts).total for form in able}
        return min(able, key=lambda form: (self._token_seconds(form), prefill[form]), default=None)

    def _token_seconds(self, form: str, context: int | None = None) -> float:
        return self.split(form, context).token_seconds(self.hosts).total

    def longest(self, form: str) -> int:
        """The longest context that fits into memory, at most MAX_CONTEXT; 0: none does."""
        fitting = bisect_left(_CONTEXTS, True, key=lambda n: not self._fits(form, n))
        return max(0, fitting - 1)

    def break_even(self, sharded: str, other: str) -> int | None:
        """The shortest context after which a token takes less time with `sharded` than `other`."""
        seconds = self._token_seconds
        found = bisect_left(_CONTEXTS, True, key=lambda n: seconds(sharded, n) < seconds(other, n))
        return found if found <= MAX_CONTEXT else None

    def verdicts(self) -> list[str]:
        """Return in sentences what is refused, and from which context on a sharded cache pays."""
        model, longest = self.model, self.longest(DATA)
        refused = [f"Refused: {why}." for why in (model.not_split, model.prompts_not_split) if why]
        if model.near_tokens is not None:
            return [*refused * (self.ranks > 1), *self._of_far_keys()]
        if self.ranks == 1:
            return ["With one rank there is nothing to split."]
        sentences = ["Without split weights: the model does not fit on a rank."]
        if longest > 0:
            fits = f"the whole model and cache fit on one rank up to {longest:,} tokens"
            sentences = [f"Without split weights: {self._pays(DATA, WHOLE)}; {fits}."]
        sentences += refused
        if not model.not_split and not self.split(TENSOR).obstacle:
            sentences.append(f"With split weights: {self._pays(TENSOR, SPLIT, SPLIT_BY_HEADS)}.")
        if model.not_cut:
            weights = model.weights
            whole = weights.itemsize * (weights.whole + weights.vectors + weights.tables)
            of = f"{whole / 1e9:,.3g} of {self.split(SPLIT_BY_HEADS).weights_bytes / 1e9:,.3g} GB"
            sentences.append(f"With split weights: {of} of a rank are not cut: {model.not_cut}.")
        return sentences

    def _of_far_keys(self) -> list[str]:
        """Sentences on keys in the host's memory, in the fastest form that has some there."""
        able = [form for form in FORMS if not self.refusal(form)]
        form = min(able, key=self._token_seconds, default=None)
        if form is None:
            return [
                "No form of this library has room for weights and near keys on the GPUs and for "
                "far keys on their hosts."
            ]
        split, machine = self.split(form), self.hosts.machine
        if split.host_bytes == 0:
            return ["No key is far: the context is not longer than the near tokens."]
        step, whole = split.far_step(machine), replace(split, model=self._without_far_keys)
        # One that reads the next layer's keys while the GPU computes, at its best.
        local = whole.token_seconds(self.hosts).local
        offloaded = max(local, step.key_bytes / machine.bus)
        return [
            f"Far keys, with {form} split: for a token the host reads "
            f"{in_digits(split.host_bytes / 1e9)} GB in {in_digits(1e3 * step.far)} ms while the "
            f"GPU attends to near keys for {in_digits(1e3 * step.near)} ms.",
            f"{in_digits(step.bus_bytes / 1e3)} kB cross the bus for a token in "
            f"{in_digits(1e3 * step.bus)} ms, one byte for "
            f"{split.host_bytes / step.bus_bytes:,.0f} of far keys; the GPU waits for "
            f"{in_digits(1e3 * step.waiting)} ms.",
            "An offloaded cache, whose keys all come to the GPU for each token, takes at least "
            f"{in_digits(1e3 * offloaded)} ms on a rank.",
        ]

    @property
    def _without_far_keys(self) -> Model:
        return replace(self.model, near_tokens=None)

    def _pays(self, other: str, *sharded: str) -> str:
        contexts = [x for form in sharded if (x := self.break_even(form, other)) is not None]
        if not contexts:
            return f"splitting the cache never makes a token faster than {other}"
        context = min(contexts)
        where = f"from {context:,} tokens on" if context > 0 else "at any context"
        return f"splitting the cache makes a token faster than {other} {where}"
