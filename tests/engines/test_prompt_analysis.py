"""The hit rates of `kvscope-engine analyze` are those of vLLM's own scheduler and block pool for the same token ids."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.warm_python import PipedProcess, WarmPython

from kvscope_engine.analysis.cache_simulation import SimulatedCache
from kvscope_engine.analysis.prompt_log import PromptLog

BLOCK_SIZE = 16
SIZES = (32, 48, 90, 4000)


def prompts_with_shared_prefixes() -> list[list[int]]:
    """Prompts of up to 480 tokens that share prefixes. A third ends with a full block, some are repeated."""
    choose = random.Random(5)
    prefixes = [[choose.randrange(3, 400) for _ in range(choose.randrange(16, 240))] for _ in range(8)]
    prompts: list[list[int]] = []
    for _ in range(400):
        if prompts and choose.random() < 0.2:
            prompts.append(choose.choice(prompts[-20:]))
            continue
        prompt = prefixes[int(8 * choose.random() ** 2)] + [
            choose.randrange(3, 400) for _ in range(choose.randrange(1, 240))
        ]
        prompts.append(prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE or None] if choose.random() < 0.3 else prompt)
    return prompts


def test_hits_equal_those_of_vllm_at_an_unbounded_and_three_finite_pool_sizes(
    warm_vllm: WarmPython, engine_env: dict[str, str], model_folder: Path, tmp_path: Path
) -> None:
    prompts, file = prompts_with_shared_prefixes(), tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    program = "import vllm_prompt_hits; vllm_prompt_hits.main()"
    words = ["-c", program, str(model_folder), str(file), *map(str, SIZES)]
    vllm = PipedProcess(
        warm_vllm, words, {name: value for name, value in engine_env.items() if name != "KVSCOPE_INSIDE"}
    )
    found = json.loads(next(line for line in vllm.stdout if line.startswith(b"{")))
    vllm.wait()
    for pipe in (vllm.stdin, vllm.stdout):
        pipe.close()
    log = PromptLog(BLOCK_SIZE)
    for number, prompt in enumerate(prompts, 1):
        log.add_tokens((number, 0), prompt)
    chains = [hashes.tolist() for hashes in log.block_hashes(BLOCK_SIZE)]
    for size in SIZES:
        cache = SimulatedCache(size, BLOCK_SIZE)
        ours = [cache.run(chain, len(prompt)) for chain, prompt in zip(chains, prompts, strict=True)]
        assert ours == found[str(size)], f"{size} blocks"
    known = log.known_units() * BLOCK_SIZE
    unbounded = [
        min(int(num_known), len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        for num_known, prompt in zip(known, prompts, strict=True)
    ]
    assert unbounded == found[str(SIZES[-1])]
    assert sum(found[str(SIZES[0])]) < sum(found[str(SIZES[1])]) < sum(unbounded)
