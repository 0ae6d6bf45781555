"""Compare attention methods for long contexts, on the keys and values of a real model.

The model reads a text (the story that comes with kvscope, repeated if it is too short). At each length, all methods
compute attention of the same queries over the same keys and values, in some of the layers. The methods alternate. The
table has the median time, the stored and the temporary bytes per token of each request, and the error of the output
relative to full attention. Then the perplexity of each method that needs no training is measured on the last tokens of
the shortest text, read one at a time. Last, the engine's own operations decode the same tokens with `--sparse-decode`
at several fractions: perplexity, the standard error of its change, and the divergence of the predictions from those of
full attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvscope_engine.bench.laboratory.labels import HEADER, cells, headline, heat_text, sparse_text
from kvscope_engine.bench.measure import progress_printer
from kvscope_engine.bench.workloads import sample_text
from kvscope_engine.text_table import table
from kvscope_telemetry.engine_config import DEVICES, DTYPES, EngineConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.program_version import program_version

if TYPE_CHECKING:
    from kvscope_engine.bench.laboratory.captured import DenseContext
    from kvscope_engine.bench.laboratory.measuring import Measurement
    from kvscope_engine.bench.laboratory.sparse_quality import SparseRow
    from kvscope_engine.model.loaded_model import LoadedModel

LENGTHS: Final = (1024, 4096)
HEAT_STEPS: Final = 48
_ERASE_LINE: Final = "\r\033[K"
"""Control characters of a terminal that erase the line with the progress."""
ProgressCallback = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="M", default="default", help="model to measure (default: `default`)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="device to run on")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="data type of weights and activations")
    parser.add_argument(
        "--lengths",
        metavar="N,N",
        default=",".join(map(str, LENGTHS)),
        help=f"tokens of context, 64 to the model's own limit (default: {','.join(map(str, LENGTHS))})",
    )
    parser.add_argument("--batch", type=int, metavar="N", default=4, help="concurrent requests (default: 4)")
    parser.add_argument("--layers", type=int, metavar="N", default=4, help="layers to measure (default: 4)")
    parser.add_argument("--repeats", type=int, metavar="N", default=7, help="rounds of each method (default: 7)")
    parser.add_argument(
        "--scored", type=int, metavar="N", default=64, help="tokens to compute perplexity over; 0: none (default: 64)"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help=(
            "text file to read (default: the story that comes with kvscope, about 2,700 tokens). A text that is too "
            "short is repeated, which makes the measured losses of the methods less accurate"
        ),
    )
    parser.add_argument(
        "--page-heat",
        type=int,
        metavar="N",
        default=16,
        help="also measure what `--page-heat N` costs decode at the shortest length; 0: skip (default: 16)",
    )
    parser.add_argument("--html", metavar="FILE", help="also write a self-contained HTML report with plots")


def run(args: argparse.Namespace) -> int:
    lengths = _lengths(args.lengths)
    for name, least in (("batch", 1), ("layers", 1), ("repeats", 1), ("scored", 0), ("page_heat", 0)):
        if getattr(args, name) < least:
            raise BadInput(
                f"--{name.replace('_', '-')} {getattr(args, name)} is not accepted: must be at least {least}"
            )
    if args.scored == 1 or args.scored > lengths[0] // 2:
        raise BadInput(f"--scored {args.scored} is not accepted: 0, or 2 to half of the shortest of --lengths")
    report = _measure(args, lengths, progress_printer(args.json))
    if args.html is not None:
        from kvscope_engine.bench.laboratory.report import html

        try:
            Path(args.html).write_text(html(report), "utf-8")
        except OSError as error:
            raise BadInput(f"--html {args.html!r} cannot be written: {error.strerror}") from None
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _lengths(option: str) -> list[int]:
    parts = option.split(",")
    if not all(part.strip().isdecimal() and 64 <= int(part) <= 1 << 20 for part in parts):
        raise BadInput(f"--lengths {option!r} is not accepted: whole numbers from 64, with commas between")
    return sorted({int(part) for part in parts})


def _measure(args: argparse.Namespace, lengths: list[int], show_progress: ProgressCallback) -> dict[str, Any]:
    from kvscope_engine.bench.laboratory.captured import capture_text, sample_layers
    from kvscope_engine.bench.laboratory.heat_cost import heat_cost
    from kvscope_engine.bench.laboratory.measuring import measure_methods
    from kvscope_engine.model.loader.model_loader import load_model
    from kvscope_engine.model.platforms.device import dtype_name

    config = EngineConfig(model=args.model, device=args.device, dtype=args.dtype)
    loaded = load_model(config, lambda progress: show_progress(progress.stage))
    if lengths[-1] > loaded.max_model_len:
        raise BadInput(
            f"--lengths {lengths[-1]} is not accepted: {loaded.info.name} reads {loaded.max_model_len} tokens"
        )
    ids = text_ids(loaded, lengths[-1], args.text)
    context = capture_text(loaded, ids, lambda done: show_progress(f"{done} of {len(ids)} tokens read"))
    rows: list[Measurement] = []
    for length in lengths:
        samples = sample_layers(context, length, args.batch, args.layers)
        rows += measure_methods(samples, args.repeats, show_progress)
    sparse = heat = None
    if args.scored:
        _add_perplexity(rows, loaded, context, ids[: lengths[0]], args.scored, show_progress)
        # Last, because it fuses the layers of `loaded`, and the methods need the original ones.
        sparse = _sparse_quality(loaded, ids[: lengths[0]], args.scored, show_progress)
    if args.page_heat:
        show_progress("page heat")
        heat = heat_cost(config, ids[: lengths[0]], args.batch, HEAT_STEPS, args.page_heat)
    return {
        "version": program_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": loaded.info.name,
        "dtype": dtype_name(loaded.dtype),
        "device": str(loaded.device),
        "batch": args.batch,
        "num_layers": min(args.layers, len(context.kv_of_layer)),
        "num_scored_tokens": args.scored,
        "max_model_len": loaded.max_model_len,
        "rows": rows,
        "sparse_decode": sparse,
        "page_heat": heat,
    }


def text_ids(loaded: LoadedModel, count: int, path: str | None) -> list[int]:
    if loaded.tokenizer is None:
        raise BadInput(f"model {loaded.info.name!r} has no tokenizer: it cannot read text")
    ids = loaded.tokenizer.encode(sample_text() if path is None else _read_text(path))
    if not ids:
        raise BadInput(f"--text {path!r} is not accepted: there is no text in it")
    return [ids[index % len(ids)] for index in range(count)]


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise BadInput(f"--text {path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"--text {path!r} is not accepted: no text in UTF-8") from None


def _sparse_quality(
    loaded: LoadedModel, ids: list[int], num_scored: int, show_progress: ProgressCallback
) -> list[SparseRow] | None:
    """Measure sparse decode with fused layers, as the engine runs it. Returns None if no layer supports block
    selection.

    The layers of `loaded` are fused in place, so the unfused model is not available afterwards.
    """
    from kvscope_engine.bench.laboratory.sparse_quality import sparse_quality
    from kvscope_engine.model.runner.sparse_layers import may_choose
    from kvscope_engine.model.verification.hook_check import check_hook
    from kvscope_engine.model.verification.ready_to_run import make_ready_to_run

    if not any(may_choose(index, call) for index, call in enumerate(check_hook(loaded.module))):
        return None
    make_ready_to_run(loaded.module, loaded.quantization)
    return sparse_quality(loaded, ids, num_scored, show_progress)


def _add_perplexity(
    rows: list[Measurement],
    loaded: LoadedModel,
    context: DenseContext,
    ids: list[int],
    num_scored: int,
    show_progress: ProgressCallback,
) -> None:
    """Set the perplexity of the rows for `len(ids)` tokens, and its change relative to full attention.

    The row of full attention must be the first of them, as it is in `METHODS`.
    """
    from kvscope_engine.bench.laboratory.captured import perplexity_after
    from kvscope_engine.bench.laboratory.methods import FULL, METHODS, UNTRAINED

    full = 0.0
    for row in rows:
        name = row["method"]
        is_same_as_full = name.startswith("paged")  # only the memory layout differs
        if row["length"] != len(ids) or name in UNTRAINED or is_same_as_full:
            continue
        show_progress(f"perplexity: {name}")
        perplexity = perplexity_after(loaded, context, ids, num_scored, METHODS[name])
        full = perplexity if name == FULL else full
        row["perplexity"], row["perplexity_change"] = perplexity, perplexity / full - 1.0


def _text(report: dict[str, Any]) -> str:
    lines = [_ERASE_LINE if sys.stderr.isatty() else "", headline(report) + "\n"]
    lines.append(table(HEADER, [cells(row) for row in report["rows"]]))
    if report["sparse_decode"]:
        lines.append("\n" + "\n".join(map(sparse_text, report["sparse_decode"])))
    if report["page_heat"] is not None:
        lines.append("\n" + heat_text(report["page_heat"]))
    return "\n".join(lines)
