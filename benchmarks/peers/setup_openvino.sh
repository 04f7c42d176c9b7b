#!/usr/bin/env bash
# Installs OpenVINO GenAI (PyPI package openvino-genai, which reads GGUF files) into a virtual
# environment of its own and prints its interpreter.
# usage: setup_openvino.sh DIR
set -euo pipefail
dir=${1:?usage: setup_openvino.sh DIR}
[ -x "$dir/bin/python" ] || python3 -m venv "$dir"
"$dir/bin/pip" install --quiet openvino-genai >&2
echo "$dir/bin/python"
