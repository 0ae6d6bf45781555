"""vLLM's scheduler and block pool, driven with given prompts one after another: `vllm_prompt_hits.py MODEL FILE SIZE`.

Prints one JSON object: for each number of blocks, the cached tokens that each prompt found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_scheduler import Driver, make_scheduler


def cached_tokens(model: str, prompts: list[list[int]], num_blocks: int) -> list[int]:
    """Return the cached tokens of each prompt, in a pool with that many blocks and the null block."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    scheduler = make_scheduler(model, "full", num_blocks + 1, 1, 4096)
    driver, found = Driver(scheduler, seed=1), list[int]()
    manager = scheduler.kv_cache_manager
    look_up = manager.get_computed_blocks

    def get_computed_blocks(request: Any) -> Any:
        result = look_up(request)
        found.append(result[1])
        return result

    manager.get_computed_blocks = get_computed_blocks
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        if hasattr(params, "update_from_generation_config"):
            params.update_from_generation_config({}, 2)
        request = Request(
            request_id=f"p{number}",
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=driver.hasher,
        )
        scheduler.add_request(request)
        while driver.step():
            pass
        assert len(found) == number + 1, "each prompt is looked up once"
    return found


def main() -> None:
    model, path, *sizes = sys.argv[1:]
    prompts = [json.loads(line)["prompt"] for line in Path(path).read_text().splitlines()]
    print(json.dumps({size: cached_tokens(model, prompts, int(size)) for size in sizes}), flush=True)


if __name__ == "__main__":
    main()
