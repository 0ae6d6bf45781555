"""Which model types are served, and how the others are refused: a file of results, and the page made of them.

    python -m tests.engine.model_types_page [--processes N] [TYPE …]

tries every type of the installed transformers (some minutes) and writes both anew.
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

Every type of transformers {version} that writes text token by token, or sees or hears and writes text, was tried on
kvscope's own engine with a tiny model of random weights. {counts}

*Served* means: the greedy tokens are those of transformers' `generate` and the five largest log-probabilities are
within 0.001 of its, in float32 on a CPU: in pieces and several requests at once, found again in the prefix cache,
forked, and preempted (swapped to host memory, with its states where there are any). Released models differ from
tiny ones in size and weights, which are compared with transformers' eager attention, layer by layer, whenever one is
loaded. A type's checkpoint is the one that transformers' source names beside its configuration; it was not loaded here.

The page is written by `python -m tests.engine.model_types_page`; a test compares it with the installed transformers.
"""
_SERVED: Final = """
## Served

| type | checkpoint | the cache holds | compared with |
|---|---|---|---|
{rows}

Full: keys and values of all tokens. Window: of a sliding window alone. Latent: MLA's latents. States: one of each
recurrent layer for a request. Indexed: keys (or latents) and values, and the keys of an indexer that chooses among
them. Own code: run by transformers' own code, prompts one after the other in each step. Types that also see or hear
are served by their text part, and compared with what the whole says to text; where transformers does not run that
without pictures or sounds, with the text part. Positions of RoBERTa and its kin begin behind that of padding, as they
were trained and as transformers' model has it when it is given none; its `generate` counts them from 0. These are
compared with the model by its own positions. A sliding window of one token (`sliding_window` 1) gives what transformers
gives with `use_cache=False`, where each token attends to itself alone; with its default cache, `generate` gives others.
"""
_REFUSED: Final = """
## Refused

In the words of the engine.

| type | checkpoint | words |
|---|---|---|
{rows}
"""
_NOT_TRIED: Final = """
## Not tried

No tiny model of these types was made.

| type | checkpoint | why |
|---|---|---|
{rows}
"""


def page(version: str, results: Results) -> str:
    """The page's text."""
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
    """The version of transformers that was tried, and what became of each of its types."""
    read = json.loads(RESULTS.read_text("utf-8"))
    return read["transformers"], read["types"]


def main() -> None:
    """Try all, and write."""
    import transformers
    from tests.engine.model_types import model_types

    parser = argparse.ArgumentParser(description="Tries every model type on the engine, and writes the page of them.")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that try at once")
    parser.add_argument("types", nargs="*", metavar="TYPE", help="to try again alone; the others stay as they were")
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
