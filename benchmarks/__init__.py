# SPDX-License-Identifier: BSD-3-Clause
"""Programs that measure, emulate and simulate, and check what they time. They run from a checkout:
none of this is installed with the package."""
