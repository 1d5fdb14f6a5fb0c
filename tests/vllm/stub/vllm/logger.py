# SPDX-License-Identifier: BSD-3-Clause
import logging


def init_logger(name):
    return logging.getLogger(name)
