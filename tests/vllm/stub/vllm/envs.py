# SPDX-License-Identifier: BSD-3-Clause
environment_variables = {}
VLLM_KEEP_ALIVE_ON_ENGINE_DEATH = False
