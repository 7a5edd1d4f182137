#!/usr/bin/env bash
# Runs the GPU tests under NVIDIA's compute-sanitizer and fails on the first error that it reports.
#
#   tools/sanitize.sh [pytest arguments]          default: tests/gpu
#   TOOLS="memcheck racecheck" tools/sanitize.sh  which of its tools; default: memcheck synccheck
#
# Only kernels of this project are looked at: Paddle's and CuPy's own would take minutes more, and failed calls of the CUDA
# API are not errors of ours (tests provoke some, and Paddle has kernels that Hopper cannot run). Under the tool one kernel runs
# after another, so tests that need two at once are left out.
# Not initcheck: it does not see what the kernels that are left out have written, and calls that unwritten.
set -euo pipefail
cd "$(dirname "$0")/.."
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(tests/gpu)
for tool in ${TOOLS:-memcheck synccheck}; do
  echo "== compute-sanitizer --tool $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 --report-api-errors no \
    --kernel-name kernel_substring=paddle_kv ${PYTHON:-python3} -W ignore -m pytest -q -p no:cacheprovider \
    -m "not concurrent_kernels" "${targets[@]}"
done
