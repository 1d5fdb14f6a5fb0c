# SPDX-License-Identifier: BSD-3-Clause
from enum import Enum


class KVCacheLayout(Enum):
    LBHNC = "LBHNC"
