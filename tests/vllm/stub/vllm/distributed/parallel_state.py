# SPDX-License-Identifier: BSD-3-Clause
group = None  # which a test sets


def get_dcp_group():
    return group
