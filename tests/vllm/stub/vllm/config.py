# SPDX-License-Identifier: BSD-3-Clause
current = None  # which a test sets


def get_current_vllm_config():
    return current
