# SPDX-License-Identifier: BSD-3-Clause
"""The lab's tests of vLLM take the models of the library's."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests" / "vllm"))
