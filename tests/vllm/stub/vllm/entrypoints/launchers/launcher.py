# SPDX-License-Identifier: BSD-3-Clause
async def watchdog_loop(server, engine):
    raise NotImplementedError
