# SPDX-License-Identifier: BSD-3-Clause
from enum import Enum

registered = {}


class AttentionBackendEnum(Enum):
    CPU_ATTN = "CPU_ATTN"
    CPU_MLA = "CPU_MLA"
    AMX_MLA = "AMX_MLA"


def register_backend(backend, class_path=None, is_mamba=False):
    registered[backend.name] = class_path
