# SPDX-License-Identifier: BSD-3-Clause
"""Multi-head latent attention: the operator alone, and a whole model with its cache."""
