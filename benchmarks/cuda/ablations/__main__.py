# SPDX-License-Identifier: BSD-3-Clause
from benchmarks.cuda.ablations import build

build()
