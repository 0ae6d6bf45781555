#!/usr/bin/env bash
# Runs the tests that may depend on the processor, on the libraries' code for others and with other numbers of threads.
# Usage: scripts/test_portable.sh [CONFIGURATION...] [-- PYTEST OPTIONS]   (PYTHON chooses the interpreter)
#   plain    what this processor gets by itself
#   avx2     as a processor without AVX-512 and AMX: torch, oneDNN, MKL, numpy's OpenBLAS, and what is compiled from C
#   default  torch's own kernels without any vector instructions
#   threads  two threads, and OpenBLAS as on a Skylake with AVX-512 (where this one has it)
# Each configuration ends with pytest's result; the script fails if any failed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
configurations=()
while (($#)) && [ "$1" != -- ]; do configurations+=("$1"); shift; done
(($#)) && shift
((${#configurations[@]})) || configurations=(plain avx2 default threads)

tests=(tests/engine/model tests/engine/simulator tests/engine/bench tests/benchmarks tests/engine/test_*.py
       tests/kernels tests/end_to_end/test_same_tokens.py)

settings() {
    case $1 in
    plain) echo "OMP_NUM_THREADS=1" ;;
    avx2) echo "OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell \
MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=AVX2 KVSCOPE_NATIVE_OPTIONS=-march=haswell" ;;
    default) echo "OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default OPENBLAS_CORETYPE=Prescott \
KVSCOPE_NATIVE_OPTIONS=-march=x86-64" ;;
    threads)
        echo "OMP_NUM_THREADS=2"
        if grep -q avx512f /proc/cpuinfo; then echo "OPENBLAS_CORETYPE=SkylakeX"; fi
        ;;
    *) return 1 ;;
    esac
}

failed=()
for name in "${configurations[@]}"; do
    if ! chosen=$(settings "$name"); then
        echo "configuration '$name' is not known: plain, avx2, default or threads" >&2
        exit 2
    fi
    echo "== $name: ${chosen//$'\n'/ }"
    # A reference that transformers computes with slow kernels takes minutes: the limit is on what stands still.
    env $chosen "$python" -m pytest "${tests[@]}" -m "not interpreter and not gpu" --timeout 1500 "$@" || failed+=("$name")
done
((${#failed[@]})) && { echo "failed: ${failed[*]}" >&2; exit 1; }
echo "all passed: ${configurations[*]}"
