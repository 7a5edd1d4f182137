#!/usr/bin/env bash
# Calls the operators of the CPU build from Python with their C++ under AddressSanitizer: nonsense, and the fuzzer's calls.
#
#   tools/sanitize_calls.sh [calls of the fuzzer, default 3000]
#
# The library is compiled into a copy of the package. Python and Paddle are not instrumented: what they allocate is still
# guarded, because all of the process's memory comes from the sanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=$PWD/build/sanitized
rm -rf "$folder/paddle_kv" "$folder/tests"
mkdir -p "$folder"
cp -r paddle_kv tests "$folder"
read -r paddle include version < <("$python" -W ignore -c 'import zlib, os, sysconfig, paddle
print(os.path.dirname(paddle.__file__), sysconfig.get_paths()["include"], paddle.__version__)' | tail -1)
echo '#define PADDLE_KV_BUILT_COMMIT ""' > "$folder/paddle_kv_commit.h"
flags=(-fPIC -O1 -g -std=c++17 -w -fno-omit-frame-pointer -fsanitize=address "-I$folder" -Icustom_ops/include
  "-isystem$paddle/include" "-isystem$paddle/include/third_party" "-isystem$include" -DPADDLE_WITH_CUSTOM_KERNEL
  "-DPADDLE_KV_PADDLE_MAJOR=${version%%.*}")
compile() {
  # shellcheck disable=SC2086  CXX may be "ccache g++"
  ${CXX:-g++} "${flags[@]}" "$@"
}
newest_header=$(find custom_ops -name '*.h*' -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
for source in $(find custom_ops -name '*.cc' -not -path '*/cuda/*'); do
  object=$folder/$(basename "$source" .cc).o
  [ "$object" -nt "$source" ] && [ "$object" -nt "$newest_header" ] || compile -c "$source" -o "$object"
done
compile -shared "$folder"/*.o -o "$folder/paddle_kv/_lib/paddle_kv_ops-paddle$version.so" \
  "-L$paddle/base" "-L$paddle/libs" -Wl,--no-as-needed -l:libpaddle.so -Wl,--version-script=custom_ops/exports.map
export LD_PRELOAD ASAN_OPTIONS PYTHONPATH=$folder
python=$(realpath -s "$python")
# The sanitizer looks for what throws exceptions before Paddle has loaded it.
LD_PRELOAD="$(${CXX:-g++} -print-file-name=libasan.so) $(${CXX:-g++} -print-file-name=libstdc++.so.6)"
ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:alloc_dealloc_mismatch=0:${ASAN_OPTIONS:-}
cd "$folder"
"$python" -W ignore -m pytest -q -p no:cacheprovider tests/ops/test_eager_call.py -k "nonsense or alike or named"
"$python" -W ignore -m pytest -q -p no:cacheprovider tests/ops/test_plain_ids.py
"$python" -W ignore -m pytest -q -p no:cacheprovider tests/tiers/test_files.py tests/tiers/test_object_format.py \
  -k "nonsense or library or range or fit or nothing"
"$python" -W ignore -c "
import zlib, paddle
paddle.set_device('cpu')
from paddle_kv.ops import _library
from tests.fuzz import one_call
assert '$folder' in str(_library.LIBRARY)
wrong = [verdict for index in range(${1:-3000}) if (verdict := one_call.run(1, index)).wrong]
assert not wrong, wrong
"
echo "nothing found"
