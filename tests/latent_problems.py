# SPDX-License-Identifier: BSD-3-Clause
"""Problems of latent attention: one kv head whose values are the first columns of its keys."""

from typing import Any

import torch

from helpers import Problem, make_problem

SIZES = {"batch": 1, "num_heads_kv": 1, "group_size": 16, "head_dim": 576, "head_dim_v": 512}


def make_latents(**shape: Any) -> Problem:
    """make_problem, in bfloat16, of values that with their scales are a view of the keys."""
    shape = {"dtype": torch.bfloat16, **SIZES, **shape}
    problem = make_problem(**shape)
    problem.v = problem.k[..., : shape["head_dim_v"]]
    if "k_scale" in problem.options:
        problem.options["v_scale"] = problem.options["k_scale"]
    assert problem.v.data_ptr() == problem.k.data_ptr()
    return problem
