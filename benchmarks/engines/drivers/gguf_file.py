# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoint as a GGUF file, for engines that read no other. Runs in their environments."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, checkpoint: Path, dtype: str) -> None:
    """Writes the matrices as "f16" or "bf16"."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    heads, heads_kv = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_name("random weights")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads_kv)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(
        gguf.LlamaFileType.MOSTLY_F16 if dtype == "f16" else gguf.LlamaFileType.MOSTLY_BF16
    )
    # Prompts are token ids; the vocabulary only has to have the right size.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"token{i}" for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["a b"])
    for name, array in tensors(checkpoint / "model.safetensors"):
        target = gguf_name(name)
        if array.ndim == 1:
            writer.add_tensor(target, widened(array))
            continue
        if target.endswith(("attn_q.weight", "attn_k.weight")):
            array = interleaved(array, heads if "attn_q" in target else heads_kv)
        if dtype == "f16":
            writer.add_tensor(target, widened(array).astype(np.float16))
        else:
            writer.add_tensor(target, np.ascontiguousarray(array), raw_dtype=Kind.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(path: Path) -> list[tuple[str, Any]]:
    """Names and bfloat16 bits of a safetensors file."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    result = []
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        result.append((name, data[begin:end].view(np.uint16).reshape(entry["shape"])))
    return result


def widened(bits: Any) -> Any:
    """bfloat16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def interleaved(array: Any, heads: int) -> Any:
    """Rows of a head in the order of a rotary embedding that turns neighbours: GGUF's for Llama."""
    rows, columns = array.shape
    return (
        array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
