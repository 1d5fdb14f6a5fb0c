# SPDX-License-Identifier: BSD-3-Clause
"""What the plug-in says to a vLLM, or to wishes, that it was not made for."""

import inspect
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tree_attention.vllm
from engine import Engine, stub_of_vllm
from tree_attention.vllm import checks

PAGE = Path(__file__).parents[2] / "docs/vllm.md"


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TREE_ATTENTION_VLLM", "1")
    with stub_of_vllm():
        yield


def registered() -> dict[str, Any]:
    from vllm.v1.attention.backends import registry

    return registry.registered


def test_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # vLLM may load plug-ins several times
        tree_attention.vllm.register()
    assert registered() == {
        "CPU_ATTN": "tree_attention.vllm.backend.TreeAttentionBackend",
        "CPU_MLA": "tree_attention.vllm.backend.LatentAttentionBackend",
        "AMX_MLA": "tree_attention.vllm.backend.LatentAttentionBackend",
    }
    from vllm.utils import cpu_triton_utils

    # One rank is left to vLLM's own function, whose name and parameters the new one has.
    mapping = torch.zeros(2, dtype=torch.int64)
    cpu_triton_utils._compute_slot_mapping_kernel_impl(2, 2, None, None, None, 0, mapping, 16)
    assert mapping.tolist() == [12345, 12345]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_unless_asked_for(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREE_ATTENTION_VLLM")
    if value is not None:
        monkeypatch.setenv("TREE_ATTENTION_VLLM", value)
    tree_attention.vllm.register()
    assert registered() == {}
    from vllm.utils import cpu_triton_utils

    assert not hasattr(cpu_triton_utils._compute_slot_mapping_kernel_impl, "__wrapped__")


def test_the_log_says_that_it_is_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm"):
        monkeypatch.setenv("TREE_ATTENTION_VLLM", "0")
        tree_attention.vllm.register()
        assert not caplog.text
        monkeypatch.setenv("TREE_ATTENTION_VLLM", "1")
        tree_attention.vllm.register()
    # In vLLM's own logger, whose lines a user sees.
    (record,) = caplog.records
    assert record.name == "vllm.tree_attention"
    assert record.message == "tree_attention is this process's attention"
    assert f'"{record.message}"' in " ".join(PAGE.read_text().split())


def test_unknown_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREE_ATTENTION_VLLM", "yes")
    with pytest.raises(ValueError, match="TREE_ATTENTION_VLLM must be 1, 0 or unset, got 'yes'"):
        tree_attention.vllm.register()


def test_another_version_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(vllm, "__version__", "0.32.0+cpu")
        tree_attention.vllm.register()
        assert not caplog.text
        monkeypatch.setattr(vllm, "__version__", "0.33.0")
        tree_attention.vllm.register()
    assert "plug-in of vLLM is tested with 0.32.0, and this is 0.33.0" in caplog.text
    assert registered()


def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "device_type", "cuda")
    with pytest.raises(RuntimeError, match="for CPUs, but this vLLM runs on 'cuda': unset TREE_"):
        tree_attention.vllm.register()


def test_a_missing_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.v1.attention.backend as interface

    monkeypatch.delattr(interface, "AttentionType")
    with pytest.raises(RuntimeError, match=r"0.32.0 differs: cannot import name 'AttentionType'"):
        tree_attention.vllm.register()
    assert registered() == {}


@pytest.mark.parametrize("method", checks.CALLED)
def test_a_changed_method_is_named(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.v1.attention.backend as interface

    owner, name = method.split(".")
    monkeypatch.setattr(getattr(interface, owner), name, lambda self, surprise: None)
    with pytest.raises(RuntimeError, match=rf"{method} has the parameters \(self surprise\)"):
        tree_attention.vllm.register()


def layer(dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    return Engine(dtype=dtype, options=options)


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only", "encoder_decoder"])
def test_attention_that_is_no_decoders(attn_type: str) -> None:
    with pytest.raises(ValueError, match=f"only attention of type 'decoder' is .*'{attn_type}'"):
        layer(attn_type=attn_type)


def test_cache_dtype() -> None:
    for name in ("float32", "fp8", "fp8_e4m3"):
        layer(kv_cache_dtype=name)
    for name in ("fp8_e5m2", "bfloat16"):
        with pytest.raises(ValueError, match=f"must be auto, fp8 or that of the model.*'{name}'"):
            layer(kv_cache_dtype=name)


def test_transfers_of_the_cache() -> None:
    import vllm.config

    layer()
    vllm.config.current.kv_transfer_config = SimpleNamespace()
    with pytest.raises(ValueError, match="--kv-transfer-config is not supported"):
        checks.check_layer("decoder", "auto", vllm.config.current)


def test_attention_to_more_than_a_range_before() -> None:
    import vllm.config

    layer()
    model = vllm.config.current.model_config
    for name, neutral, value, sentence in (
        (
            "is_mm_prefix_lm",
            False,
            True,
            r"later ones \(is_mm_prefix_lm\) are not .*--language-model-only",
        ),
        (
            "rswa_window",
            None,
            128,
            r"\(R-SWA\) is not supported, .*, got rswa_window = 128; serve another",
        ),
    ):
        setattr(model, name, neutral)
        checks.check_layer("decoder", "auto", vllm.config.current)
        setattr(model, name, value)
        with pytest.raises(ValueError, match=sentence):
            checks.check_layer("decoder", "auto", vllm.config.current)
        setattr(model, name, neutral)


def test_attention_that_is_not_causal() -> None:
    engine = layer()
    engine.step({0: 4})
    step = engine.common({0: 4}, torch.arange(4))
    for causal in (False, torch.tensor([True])):
        step.causal = causal
        with pytest.raises(ValueError, match="attention must be causal"):
            engine.builder.build(0, step)


def test_a_prefix_lm_is_refused_before_its_first_step() -> None:
    layer()
    from tree_attention.vllm.backend import MetadataBuilder

    with pytest.raises(ValueError, match="attention must be causal, this model's is not"):
        MetadataBuilder(SimpleNamespace(non_causal=True), [], None, torch.device("cpu"))


@pytest.mark.parametrize(
    "method, num_guesses, is_refused",
    [("draft_model", 1, True), ("eagle", 2, True), ("eagle", 1, False), ("ngram", 3, False)],
)
def test_drafts_with_context_parallelism(method: str, num_guesses: int, is_refused: bool) -> None:
    drafts = SimpleNamespace(
        method=method,
        num_speculative_tokens=num_guesses,
        uses_draft_model=lambda: method == "draft_model",
        use_eagle=lambda: method == "eagle",
    )
    expected = pytest.raises(ValueError, match=f"the method '{method}', as vLLM writes the keys")
    with expected if is_refused else nullcontext():
        checks.check_drafts(SimpleNamespace(speculative_config=drafts))


def test_quantised_output() -> None:
    engine, x = layer(), torch.zeros(1, 4, 16)
    with pytest.raises(ValueError, match="quantised outputs are not supported"):
        engine.layer.forward(None, x, x, x, engine.cache, None, x, output_scale=x)


@pytest.mark.parametrize("method", ["get_name", "get_impl_cls", "get_builder_cls"])
def test_latent_attention(method: str) -> None:
    from tree_attention.vllm.backend import LatentAttentionBackend

    with pytest.raises(ValueError, match=r"latent attention \(MLA\) is not supported"):
        getattr(LatentAttentionBackend, method)()


def test_context_parallelism_without_the_known_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils import cpu_triton_utils

    def changed(num_tokens: int, world_size: int) -> None: ...

    name = "_compute_slot_mapping_kernel_impl"
    monkeypatch.setattr(cpu_triton_utils, name, changed)
    tree_attention.vllm.register()  # everything else works
    assert getattr(cpu_triton_utils, name) is changed
    group = SimpleNamespace(world_size=2, rank=0, cpu_group=None)
    with pytest.raises(RuntimeError, match=r"--decode-context-parallel-size .* \(num_tokens world"):
        Engine(group)


def test_the_replacement_has_the_signature_of_vllms() -> None:
    from vllm.utils import cpu_triton_utils

    before = inspect.signature(cpu_triton_utils._compute_slot_mapping_kernel_impl)
    tree_attention.vllm.register()
    assert inspect.signature(cpu_triton_utils._compute_slot_mapping_kernel_impl) == before
