"""A cost model in a JSON file: written by benchmarks/step_costs.py, read by `simulate --costs`, validated on
reading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from kvscope_engine.simulator.costs.cost_model import CostModel, Preset
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.whole_file import write_whole

FORMAT: Final = 1
MAX_FILE_BYTES: Final = 1 << 20
MAX_COUNT: Final = 1 << 40


class CostFile(msgspec.Struct, frozen=True, kw_only=True):
    kvscope_costs: int = FORMAT
    """Version of the file format."""
    model: str
    device: str
    num_slots: int
    """Token slots of the KV pool on the measured device."""
    max_model_len: int
    num_layers: int
    cost_model: CostModel

    @property
    def preset(self) -> Preset:
        return Preset(self.cost_model, self.num_slots, self.max_model_len, self.num_layers)


def save_costs(path: Path, costs: CostFile) -> None:
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n")
    except OSError as error:
        raise KvscopeError(f"costs cannot be written to {str(path)!r}: {error.strerror}") from None


def load_costs(path: Path) -> CostFile:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadInput(f"costs {str(path)!r} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise BadInput(f"costs {str(path)!r} are not accepted: larger than {MAX_FILE_BYTES} bytes")
    try:
        costs = msgspec.json.decode(data, type=CostFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadInput(f"costs {str(path)!r} are not accepted: {error}") from None
    if costs.kvscope_costs != FORMAT:
        raise BadInput(f"costs {str(path)!r} are of format {costs.kvscope_costs}: this version reads {FORMAT}")
    if not all(1 <= count <= MAX_COUNT for count in (costs.num_slots, costs.max_model_len, costs.num_layers)):
        raise BadInput(
            f"costs {str(path)!r} are not accepted: num_slots={costs.num_slots} and max_model_len="
            f"{costs.max_model_len} are from 1 to {MAX_COUNT}"
        )
    return costs
