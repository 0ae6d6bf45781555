"""Tries which model types the engine serves, and writes docs/reference/model-types.md from the results.

    python -m tests.engine.model_types_page [--processes N] [TYPE …]

tries every type of the installed transformers (some minutes), and writes the results and the page.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = Path(__file__).with_name("model_types.json")
PAGE: Final = ROOT / "docs/reference/model-types.md"
Results = Mapping[str, Mapping[str, str]]

_HEAD: Final = """# Model types

This page lists which model types kvscope's own engine serves. Every type of transformers {version} that generates text
token by token, from text alone or also from images or sound, was tried with a tiny model of random weights. {counts}

*Served* means that the greedy tokens equal those of transformers' `generate`, and the five largest log-probabilities
differ by at most 0.001, in float32 on a CPU. This was tested with prompts in chunks, several requests in a batch, a
prefix from the cache, forks, and preemption (swap to host memory, with recurrent states if there are any).

Released models differ from tiny ones in size and weights. They are compared with transformers' eager attention, layer
by layer, each time one is loaded. The checkpoint of a type is the one that transformers' source names next to its
configuration; it was not loaded here.

`python -m tests.engine.model_types_page` writes this page; a test compares it with the installed transformers.
"""
_SERVED: Final = """
## Served

| type | checkpoint | the cache holds | compared with |
|---|---|---|---|
{rows}

The third column says what the cache holds:

- **full:** keys and values of all tokens;
- **window:** keys and values of a sliding window;
- **latent:** latents of multi-head latent attention (MLA);
- **states:** one state per request and recurrent layer;
- **indexed:** keys (or latents) and values, and the keys of an indexer that selects among them;
- **own code:** the model runs on transformers' own code, with the prompts of a step one after the other.

The last column says what the result was compared with:

- **whole:** the whole model. Types that also process images or sound are served with their text part, and compared with
  what the whole model answers to text;
- **text part:** only the text part, because transformers does not run the whole model without images or sound;
- **whole, by its own positions:** the model as it computes positions itself. RoBERTa and similar types number positions
  from after the padding index, as they were trained; transformers' `generate` numbers them from 0.

A sliding window of one token (`sliding_window` 1) gives what transformers gives with `use_cache=False`, where each
token attends only to itself. With its default cache, `generate` gives other tokens.
"""
_REFUSED: Final = """
## Refused

The last column is the engine's message.

| type | checkpoint | message |
|---|---|---|
{rows}
"""
_NOT_TRIED: Final = """
## Not tried

No tiny model was created for these types.

| type | checkpoint | reason |
|---|---|---|
{rows}
"""


def page(version: str, results: Results) -> str:
    """Return the text of the page."""
    parts = [_HEAD.format(version=version, counts=_counts(results))]
    forms = {"served": (_SERVED, ("cache", "compared_with")), "refused": (_REFUSED, ("words",))}
    for result, (form, columns) in (forms | {"not tried": (_NOT_TRIED, ("words",))}).items():
        rows = [_row(name, found, columns) for name, found in results.items() if found["result"] == result]
        parts += [form.format(rows="\n".join(rows))] if rows else []
    return "".join(parts)


def _counts(results: Results) -> str:
    counts = Counter(found["result"] for found in results.values())
    said = [f"{result} {counts[result]}" for result in ("served", "refused", "not tried") if counts[result]]
    return f"Of {len(results)} types: {', '.join(said)}."


def _row(name: str, found: Mapping[str, str], columns: Iterable[str]) -> str:
    cells = [f"`{name}`", found["example"], *(found[column] for column in columns)]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('<', '&lt;') for cell in cells)} |"


def read_results() -> tuple[str, Results]:
    """Return the version of transformers that was tried, and the result of each of its types."""
    read = json.loads(RESULTS.read_text("utf-8"))
    return read["transformers"], read["types"]


def main() -> None:
    import transformers
    from tests.engine.model_types import model_types

    parser = argparse.ArgumentParser(description="Try every model type on the engine, and write the page about them.")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="number of parallel processes")
    parser.add_argument(
        "types", nargs="*", metavar="TYPE", help="try only these types again; the others keep their results"
    )
    arguments, types = parser.parse_args(), model_types()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        tried = dict(pool.imap_unordered(_try, arguments.types or types))
    tried = (dict(read_results()[1]) if arguments.types else {}) | tried
    results = {name: tried[name] for name in types}
    written: dict[str, Any] = {"transformers": transformers.__version__, "types": results}
    RESULTS.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    PAGE.write_text(page(transformers.__version__, results), "utf-8")
    print(_counts(results))
    for name, found in results.items():
        if found["result"] not in ("served", "refused"):
            print(f"{name}: {found['result']}: {found['words']}")


def _try(model_type: str) -> tuple[str, dict[str, str]]:
    import torch
    from tests.engine.trial_of_types import try_type
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return model_type, asdict(try_type(model_type))


if __name__ == "__main__":
    main()
