# SPDX-License-Identifier: BSD-3-Clause
from dataclasses import dataclass


@dataclass
class AsyncEngineArgs:
    model: str = ""
    max_model_len: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    hf_token: str | None = None
    model_loader_extra_config: dict | None = None
