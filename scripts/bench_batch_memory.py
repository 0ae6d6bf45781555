"""The KV memory that a batch takes, over batch size and input length, by allocator: simulated or in the real engine.

`python scripts/bench_batch_memory.py` runs each batch through the simulator with the sizes of Llama-3.1-8B; `--engine`
runs smaller ones through the engine with the default model. A cell is the most memory that requests held in any step.
`contiguous` reserves `--max-model-len` tokens a request, `buddy` powers of two, `paged` takes blocks as tokens come;
"shared half" is `paged` where the first half of all prompts is one text and the prefix cache finds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Submit

BLOCK_SIZE = 16
ALLOCATORS = ("contiguous", "buddy", "paged", "shared half")
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One batch: `size` prompts of `input_tokens` each, answered with `output_tokens`."""

    size: int
    input_tokens: int
    output_tokens: int
    max_model_len: int

    @property
    def num_blocks(self) -> int:
        """Of a pool that holds the batch under each allocator."""
        return self.size * (-(-self.max_model_len // BLOCK_SIZE)) + 1

    @property
    def shared_tokens(self) -> int:
        """What all prompts begin with, where a half is shared."""
        return self.input_tokens // 2


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="run the default model instead of the simulator")
    parser.add_argument("--batch", type=int, nargs="+", metavar="REQUESTS")
    parser.add_argument("--input", type=int, nargs="+", metavar="TOKENS")
    parser.add_argument("--output", type=int, metavar="TOKENS")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS")
    args = parser.parse_args()
    batches = args.batch or ([1, 4, 16] if args.engine else [1, 16, 64, 256])
    inputs = args.input or ([64, 256, 960] if args.engine else [128, 512, 2048, 3840])
    output = args.output or (64 if args.engine else 256)
    max_model_len = args.max_model_len or (1024 if args.engine else 4096)
    measure = in_engine if args.engine else simulated
    print(f"{output} tokens of output, at most {max_model_len} tokens a request; MiB of KV held at most")
    print("| batch | input | " + " | ".join(ALLOCATORS) + " | paged saves | shared half saves |")
    print("|---" * (len(ALLOCATORS) + 4) + "|")
    for size in batches:
        for input_tokens in inputs:
            case = Case(size, input_tokens, output, max_model_len)
            held = {allocator: measure(case, allocator) / MIB for allocator in ALLOCATORS}
            saved = [1 - held[allocator] / held["contiguous"] for allocator in ("paged", "shared half")]
            cells = [f"{value:.0f}" for value in held.values()] + [f"{100 * value:.0f} %" for value in saved]
            print(f"| {size} | {input_tokens} | " + " | ".join(cells) + " |", flush=True)


def simulated(case: Case, allocator: str) -> float:
    """Bytes that requests held at most, in the simulator with Llama-3.1-8B's sizes."""
    from kvscope_engine.simulator.costs.cost_model import PRESETS
    from kvscope_engine.simulator.limits import SimulatedLimits
    from kvscope_engine.simulator.simulation import Setup, Simulation
    from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest

    is_shared = allocator == "shared half"
    one = WorkloadRequest(0, case.input_tokens, case.output_tokens, (0,) if is_shared else ())
    # The first request of a shared text runs one step alone: it computes what the others find.
    late = WorkloadRequest(1, case.input_tokens, case.output_tokens, one.text_ids)
    requests = (one, *[late] * (case.size - 1)) if is_shared else (one,) * case.size
    limits = SimulatedLimits(
        num_blocks=case.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=case.size,
        max_num_batched_tokens=case.size * case.input_tokens,  # all run at once
        max_model_len=case.max_model_len,
    )
    workload = Workload("batch", requests, tokens_per_text=max(case.shared_tokens, 1))
    cost = PRESETS["llama-3.1-8b"].cost
    simulation = Simulation(Setup(workload, limits, cost, "paged" if is_shared else allocator))
    most = 0
    while simulation.advance():
        state = simulation.pool.ledger.part(0, case.num_blocks).state
        most = max(most, int(np.count_nonzero(state == BlockState.ACTIVE)))
    return most * BLOCK_SIZE * cost.kv_bytes_per_token


def in_engine(case: Case, allocator: str) -> float:
    """Bytes that requests held at most, in the engine with the default model; the answers are made in full."""
    from kvscope_engine import Engine, EngineConfig

    is_shared = allocator == "shared half"
    config = EngineConfig(
        model="default",
        allocator="paged" if is_shared else allocator,
        enable_prefix_caching=is_shared,
        num_gpu_blocks_override=case.num_blocks,
        max_num_seqs=case.size,
        max_num_batched_tokens=case.size * case.input_tokens,
        max_model_len=case.max_model_len,
    )
    with Engine(config) as engine:
        most = 0
        for submit in prompts(case, is_shared):
            engine.submit(submit)
            if is_shared and submit.request_id == "0":
                engine.step()  # computes what the others find
        while engine.has_unfinished:
            engine.step()
            states = np.frombuffer(engine.snapshot().blocks.state, np.uint8)
            most = max(most, int(np.count_nonzero(states == BlockState.ACTIVE)))
        return most * engine.hello.cache.block_bytes


def prompts(case: Case, is_shared: bool) -> Iterator[Submit]:
    """The batch's prompts as token ids: random, with a common first half if asked for."""
    from kvscope_telemetry.messages.sampling_params import SamplingParams

    random = np.random.default_rng(0)
    common = random.integers(1000, 40_000, case.shared_tokens)
    for number in range(case.size):
        tokens = random.integers(1000, 40_000, case.input_tokens)
        if is_shared:
            tokens[: case.shared_tokens] = common
        sampling = SamplingParams(temperature=0, max_tokens=case.output_tokens, ignore_eos=True)
        yield Submit(request_id=str(number), prompt_token_ids=tuple(tokens.tolist()), sampling=sampling)


if __name__ == "__main__":
    main()
