# SPDX-License-Identifier: BSD-3-Clause
"""As much of vLLM's interfaces as the plug-in uses, for tests where vLLM is not installed.

tests/vllm/test_engines.py compares names and parameters with the package itself.
"""

__version__ = "0.32.0"
