#!/bin/sh
# The tests marked `gpu` and a short benchmark, on a machine with an NVIDIA GPU. Without one it says so and ends
# with 0: nothing failed, and nothing passed either. PYTHON chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "tests/gpu.sh needs a CUDA device and a torch built for it; there is none here. Nothing was tested."
    exit 0
fi

# The packages need not be installed: a GPU box may have torch and Triton only.
PYTHONPATH="$PWD/kernels:$PWD/engine${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
# Nor need pytest's plugins be: the options that only they know would be errors under --strict-config.
set -- tests/kernels
if "$PYTHON" -c 'import msgspec, transformers' 2>/dev/null; then
    set -- "$@" tests/engine/model/tiers tests/engine/model/virtual_memory tests/engine/test_engine_on_gpu.py
else
    echo "Only the kernels are tested: the engine needs msgspec and transformers beside torch."
fi
"$PYTHON" -m pytest -o addopts= -o filterwarnings= -q --import-mode=importlib -m gpu "$@"
if [ $# -gt 1 ]; then
    "$PYTHON" -m kvscope_engine.cli.main bench memory --device cuda --mib 512
fi
"$PYTHON" -m kvscope_kernels.benchmark
