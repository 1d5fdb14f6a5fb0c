# SPDX-License-Identifier: BSD-3-Clause
"""Stand-ins for Python and NVIDIA's tools, with which scripts/gpu_check.sh runs without a GPU, and
a report of tests."""

PROGRAMS = {
    "nvidia-smi": 'echo "A GPU, 9.0"',
    "nvcc": """
while [[ $# -gt 0 && $1 != -o ]]; do shift; done
[[ $# == 0 ]] && exit
printf '#!/bin/bash\\necho all answers are right\\n' >"$2"; chmod +x "$2"
""",
    "ncu": 'while [[ $1 != -o ]]; do shift || exit 0; done; echo report >"$2.ncu-rep"',
    "cuobjdump": 'echo "Function kernel: REG:128"',
    "compute-sanitizer": """
echo "$*" >>calls
[[ $2 == "${FAILING_TOOL:-}" ]] && status=99
echo "a test PASSED"
echo "========= ERROR SUMMARY: ${status:-0} errors"
exit "${status:-0}"
""",
    "python": """
echo "$*" >>calls
name=none
case "$*" in
  *setup.py*) name=build; touch python/tree_attention/_C.so; echo "for $TORCH_CUDA_ARCH_LIST" ;;
  *bfloat16*test_cuda_smoke*) name=gate ;;
  *gpu_smoke*) name=smoke; echo '{"a kernel": "passed"}' >"$2"; echo "1 of 1 kernels passed" ;;
  *decode.py*--only*) name=rows ;;
  *decode.py*) name=benchmark; touch "${!#}"/decode_cuda.{json,md} ;;
  *tune*) name=tune; echo '{"rows": []}' >"${!#}/tune_cuda.json" ;;
  *cuda.profile*) name=profile; echo '{"a case": {"time": 1.5}}' >"$3.json" ;;
  *8_bit_keys*) name=tests; echo "REQUIRE_CUDA is $REQUIRE_CUDA"; echo "$PYTHONPATH"
    echo '1 | failed'; for word; do [[ $word == --junitxml=* ]] && cp report "${word#*=}"; done ;;
  *"import tree_attention"*) name=import ;;
esac
[[ $name == "${HANGING:-}" ]] && sleep 100
[[ $name == "${KILLED:-}" ]] && kill -9 $$
[[ $name == "${FAILING:-}" ]] && exit 1
exit 0
""",
}


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="b"/><testcase classname="a" name="c[1]"><failure/></testcase>
<testcase classname="a" name="d"><skipped/></testcase>
</testsuite></testsuites>"""
