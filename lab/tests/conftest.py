# SPDX-License-Identifier: BSD-3-Clause
"""The lab's tests begin as the library's do."""

import session

_seed = session._seed
