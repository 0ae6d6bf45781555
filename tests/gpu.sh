#!/bin/sh
# The tests marked `gpu`, part by part, and short benchmarks, on a machine with an NVIDIA GPU; at the end a table
# of what passed, failed and was skipped, and in how many seconds. Ends with 1 when a part failed. Without a GPU it says
# so and ends with 0: nothing failed, and nothing passed either.
# PYTHON chooses the interpreter, KVSCOPE_GPU_SECONDS how long all parts may take (480).
# KVSCOPE_GPU_REHEARSAL=1 runs this script and the same test bodies on the CPU, so that no GPU is needed to see that
# they run at all; what only a GPU can do is skipped there.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
REHEARSAL=${KVSCOPE_GPU_REHEARSAL:-}
PART_SECONDS=240 # of one part at most: a test that hangs is a failure, and the others still run
ALL_SECONDS=${KVSCOPE_GPU_SECONDS:-480} # of all: what has no time left is told in the table, which always comes
if [ -n "$REHEARSAL" ]; then PART_SECONDS=2400 ALL_SECONDS=14400; fi # a busy CPU is no GPU
EIGHT_B_MIB=20480 # 15 GiB of weights, a step's activations, and keys and values of some requests
BEGAN=$(date +%s)

FINDS='import sys, torch; sys.exit(0 if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device")'
if [ -z "$REHEARSAL" ] && ! WHY=$("$PYTHON" -c "$FINDS" 2>&1); then
    echo "tests/gpu.sh needs a CUDA device and a torch built for it: $(echo "$WHY" | tail -n 1). Nothing was tested."
    exit 0
fi
NEEDS='from importlib.util import find_spec as find; print(*(n for n in ("pytest", "hypothesis", "numpy") if not find(n)))'
MISSING=$("$PYTHON" -c "$NEEDS")

# The packages need not be installed: a GPU box may have torch and Triton only.
PYTHONPATH="$PWD/kernels:$PWD/engine${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
TABLE=$(mktemp)
LOG=$(mktemp)
trap 'rm -f "$TABLE" "$LOG"' EXIT
FAILED=0

# row NAME STATUS SECONDS WHAT: one line of the table.
row() {
    printf '%-18s %-8s %6s s  %s\n' "$1" "$2" "$3" "$4" >>"$TABLE"
}

# part NAME COMMAND...: run it, show what it says, note how it ended and its last line about tests.
part() {
    name=$1
    shift
    started=$(date +%s)
    limit=$((ALL_SECONDS - started + BEGAN))
    if [ "$limit" -lt 10 ]; then
        row "$name" skipped 0 "the $ALL_SECONDS s of all parts are over (KVSCOPE_GPU_SECONDS)"
        return
    fi
    if [ "$limit" -gt "$PART_SECONDS" ]; then limit=$PART_SECONDS; fi
    echo
    echo "== $name"
    { timeout "$limit" "$@" 2>&1 && echo 0 >"$LOG.code" || echo $? >"$LOG.code"; } | tee "$LOG"
    code=$(cat "$LOG.code")
    rm -f "$LOG.code"
    seconds=$(($(date +%s) - started))
    counts=$(grep -Eo '[0-9]+ (passed|failed|skipped|errors?)' "$LOG" | tail -n 4 | paste -sd ' ' -)
    case $code in
    0) row "$name" passed "$seconds" "$counts" ;;
    5) row "$name" skipped "$seconds" "no test here" ;;
    124) if [ "$limit" -lt "$PART_SECONDS" ]; then
        row "$name" cut "$seconds" "the $ALL_SECONDS s of all parts were over; $counts"
    else
        FAILED=1 && row "$name" FAILED "$seconds" "stopped after $limit s $counts"
    fi ;;
    *) FAILED=1 && row "$name" FAILED "$seconds" "$counts" ;;
    esac
}

# tests NAME PATH...: those marked `gpu`. Pytest's plugins need not be installed: the options that only they know would
# be errors under --strict-config.
tests() {
    name=$1
    shift
    if [ -n "$MISSING" ]; then
        FAILED=1 && row "$name" FAILED 0 "not installed: $MISSING"
        return
    fi
    part "$name" "$PYTHON" -m pytest -o addopts= -o filterwarnings= -q -ra --import-mode=importlib -m gpu "$@"
}

# Most of the kernels' time is compiling them, which several processes do at once where pytest-xdist is installed.
WORKERS=
if "$PYTHON" -c 'import xdist' 2>/dev/null; then WORKERS="-n $(nproc | awk '{print ($1 > 12) ? 12 : $1}')"; fi
# shellcheck disable=SC2086 # two words, or none
tests kernels $WORKERS tests/kernels
if "$PYTHON" -c 'import kvscope_engine.engine, kvscope_engine.cli.main' 2>"$LOG"; then
    tests loading tests/engine/model/loader/test_model_loader.py
    tests benchmarks tests/engine/bench/kernels
    tests tiers tests/engine/model/kv_cache/kv_offload tests/engine/model/device_memory/test_host_slab.py
    tests "virtual memory" tests/engine/model/kv_cache/virtual_memory
    tests "streamed weights" tests/engine/model/cpu_offload/test_streaming_on_gpu.py
    tests "end to end" tests/engine/test_engine_on_gpu.py
    tests deterministic tests/engine/test_deterministic.py
    if [ -n "$REHEARSAL" ]; then set -- --device cpu --only copy --rounds 1; else set -- --device cuda --rounds 5; fi
    part "kernels, beside" "$PYTHON" -m kvscope_engine.cli.main bench kernels "$@"
    if [ -n "$REHEARSAL" ]; then set -- --device cpu --mib 32; else set -- --device cuda --mib 512; fi
    part "tiers, speed" "$PYTHON" -m kvscope_engine.cli.main bench memory "$@"
    if [ -z "$REHEARSAL" ]; then
        MIB=$("$PYTHON" -c 'import torch; print(torch.cuda.mem_get_info()[1] >> 20)')
        if [ "$MIB" -lt "$EIGHT_B_MIB" ]; then
            for name in "8B, 24 GiB" "8B, speed" "8B, first token"; do
                row "$name" skipped 0 "it needs a GPU with $EIGHT_B_MIB MiB, this one has $MIB"
            done
        else
            # A card sold with 24 GB has less, which is then all that there is to limit it to.
            LIMIT=$((MIB < 24576 ? MIB : 24576))
            if [ "$MIB" -lt 49152 ]; then SHARE=0.9; else SHARE=0.6; fi
            part "8B, 24 GiB" "$PYTHON" -m kvscope_engine.cli.main bench gpu --memory "${LIMIT}MiB" --no-eager --batch 1
            part "8B, speed" "$PYTHON" -m kvscope_engine.cli.main bench gpu --gpu-memory-utilization "$SHARE" \
                --with quantization=int4
            part "8B, first token" "$PYTHON" -m kvscope_engine.cli.main bench gpu --gpu-memory-utilization "$SHARE" --ttft
        fi
        part "135M, speed" "$PYTHON" -m kvscope_engine.cli.main bench gpu --gpu-memory-utilization 0.3 --shape 135m
    else
        for name in "8B, 24 GiB" "8B, speed" "8B, first token" "135M, speed"; do row "$name" skipped 0 "a rehearsal"; done
    fi
else
    row engine skipped 0 "$(tail -n 1 "$LOG")"
fi

echo
cat "$TABLE"
exit "$FAILED"
