# SPDX-License-Identifier: BSD-3-Clause
"""The lab's tests begin as the library's do."""

import session

_seed = session._seed
_share_servers = session._share_servers
