# SPDX-License-Identifier: BSD-3-Clause
"""`lean_decode` as vLLM's attention on a CPU, context parallelism there, and several hosts.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`.
`python -m tree_attention.vllm serve` starts its server. docs/vllm.md is for users.
"""

import logging

from . import checks

__all__ = ["register"]

_BACKENDS = {
    "CPU_ATTN": "TreeAttentionBackend",
    "CPU_MLA": "LatentAttentionBackend",
    "AMX_MLA": "LatentAttentionBackend",
}


def register() -> None:
    """Makes `lean_decode` the attention of vLLM in this process, if TREE_ATTENTION_VLLM is 1.

    Raises:
        ValueError: TREE_ATTENTION_VLLM has a value that means nothing.
        RuntimeError: vLLM does not run on a CPU, or lacks what the plug-in uses.
    """
    if not checks.is_asked_for():
        return
    checks.check_engine()
    # What follows imports vLLM's attention, which has to be there as it is expected.
    from vllm.envs import environment_variables
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import context_parallel, groups

    for name, backend in _BACKENDS.items():
        register_backend(AttentionBackendEnum[name], f"{__name__}.backend.{backend}")
    context_parallel.replace_slot_mapping()
    communicator = f"{__name__}.groups.GroupCommunicator"
    type(current_platform).get_device_communicator_cls = classmethod(lambda cls: communicator)
    environment_variables[checks.VARIABLE] = groups.names_in_graphs  # which its cache goes by
    logging.getLogger("vllm.tree_attention").info("tree_attention is this process's attention")
