#!/usr/bin/env bash
# Builds the bare C++ program that the engine is held against (kernel_yardstick: SmolLM2-135M only, AVX-512
# VNNI and BF16) and prints its path.
# usage: setup_yardstick.sh DIR SOURCE   (SOURCE has model.cpp and dump.py)
set -euo pipefail
dir=${1:?usage: setup_yardstick.sh DIR SOURCE} source=${2:?usage: setup_yardstick.sh DIR SOURCE}
[ -x "$dir/bin/python" ] || python3 -m venv "$dir"
"$dir/bin/pip" install --quiet gguf numpy >&2
g++ -std=c++17 -O3 -march=native -pthread "$source/model.cpp" -o "$dir/yardstick"
cp -f "$source/dump.py" "$dir/dump.py"
echo "$dir/yardstick"
