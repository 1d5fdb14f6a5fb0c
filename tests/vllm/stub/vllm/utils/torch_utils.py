# SPDX-License-Identifier: BSD-3-Clause
import torch

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.uint8,
    "fp8_e4m3": torch.uint8,
    "fp8_e5m2": torch.uint8,
}


def kv_cache_dtype_str_to_dtype(kv_cache_dtype, model_config):
    return model_config.dtype if kv_cache_dtype == "auto" else DTYPES[kv_cache_dtype]
