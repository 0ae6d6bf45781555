"""Mooncake and Azure traces are read, and invalid lines are reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvscope_engine.simulator.costs.cost_model import PRESETS
from kvscope_engine.simulator.simulated_tiers import SimulatedTiers
from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
from kvscope_engine.simulator.simulation_limits import SimulatedLimits
from kvscope_engine.simulator.simulation_report import make_report
from kvscope_engine.simulator.workloads.azure import read_azure
from kvscope_engine.simulator.workloads.mooncake import read_mooncake
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest
from kvscope_telemetry.errors import BadInput

MOONCAKE = '{"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 99999999999, 48]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
COST = replace(PRESETS["llama-3.1-8b"].cost, disk_bandwidth=1e11)
Read = Callable[..., Workload]


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[[str | bytes, str], Path]:
    """Function that writes a file in its own folder: `write_trace(content, name)`."""

    def write_file(content: str | bytes, name: str) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


def test_mooncake_trace_is_read_as_workload(write_trace: Callable[..., Path]) -> None:
    text = (
        MOONCAKE
        + '\n\n{"timestamp": 27000, "input_length": 700, "output_length": 0, "hash_ids": [46, 50], "more": 1}\n'
    )
    workload = read_mooncake(write_trace(text, "trace.jsonl"))
    assert workload.requests == (
        WorkloadRequest(0, 700, 1, (0, 3)),
        WorkloadRequest(482_000_000, 1030, 52, (0, 1, 2)),
    )
    assert (workload.name, workload.tokens_per_text, workload.longest) == ("trace.jsonl", 512, 1082)


def test_equal_hash_ids_give_equal_tokens(write_trace: Callable[..., Path]) -> None:
    text = MOONCAKE + "\n" + MOONCAKE.replace("1030", "1200").replace("48]", "77]")
    workload = read_mooncake(write_trace(text, "trace.jsonl"))
    first, second = (workload.prompt_token_ids(request, -1) for request in workload.requests)
    assert (len(first), len(second)) == (1030, 1200)
    assert first[:1024] == second[:1024]
    assert first[:512] != first[512:1024]
    assert not set(first[1024:]) & set(second[1024:])


def test_tokens_without_hash_ids_are_unique_to_the_request(write_trace: Callable[..., Path]) -> None:
    for text_ids, shared in (((), 0), ((46, 7), 1024)):
        line = f'{{"timestamp": 1.5, "input_length": 1030, "output_length": 1, "hash_ids": {list(text_ids)}}}'
        workload = read_mooncake(write_trace(line, "trace.jsonl"))
        tokens = workload.prompt_token_ids(workload.requests[0], -9)
        assert tokens[shared:] == [-9] * (1030 - shared)
        assert -9 not in tokens[:shared]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3"),
        ("[1, 2]", "array"),
        ('{"timestamp": 1, "input_length": 5}', "output_length"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 5}', "timestamp"),
        ('{"timestamp": "1", "input_length": 5, "output_length": 5}', "timestamp"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 5}', "input_length 0"),
        ('{"timestamp": 1, "input_length": 5.5, "output_length": 5}', "input_length"),
        ('{"timestamp": 1, "input_length": 5, "output_length": -2}', "output_length -2"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 99999999999}', "output_length 99999999999"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1, 2]}', "2 hash ids"),
        ('{"timestamp": 1, "input_length": 1025, "output_length": 5, "hash_ids": [1]}', "1 hash ids"),
        ("[" * 100_000, "line 3"),
        (b"\xff\xfe", "utf-8"),
        (MOONCAKE[:-20], "line 3"),
        ('{"timestamp": 1, "input_length": -5, "output_length": 5}', "input_length -5"),
        ('{"timestamp": 1, "input_length": 5, "output_length": ' + "9" * 5000 + "}", "line 3"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 5}', "line 3"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5}', "line 3"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [' + "9" * 5000 + "]}", "line 3"),
        (MOONCAKE.encode()[:-3] + b"\xc3\x28]}", "line 3"),
        ("null", "null"),
    ],
)
def test_invalid_mooncake_line_is_reported_with_its_number(
    write_trace: Callable[..., Path], line: str | bytes, said: str
) -> None:
    raw = line.encode() if isinstance(line, str) else line
    path = write_trace(MOONCAKE.encode() + b"\n\n" + raw + b"\n", "trace.jsonl")
    with pytest.raises(BadInput) as refusal:
        read_mooncake(path)
    assert str(refusal.value).startswith(f"{path}, line 3: ")
    assert said in str(refusal.value)


def test_azure_traces_of_2023_and_2024_are_read(write_trace: Callable[..., Path]) -> None:
    rows = "2023-11-16 18:15:47.6805900,374,44\r\n2023-11-16 18:15:46.6805900,396,0\r\n"
    workload = read_azure(write_trace(AZURE + rows, "trace.csv"))
    assert workload.requests == (WorkloadRequest(0, 396, 1), WorkloadRequest(10**9, 374, 44))
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n"
    assert [request.arrival_ns for request in read_azure(write_trace(AZURE + rows, "trace.csv")).requests] == [
        0,
        7_405_000,
    ]


def test_azure_columns_are_found_by_name(write_trace: Callable[..., Path]) -> None:
    text = "\ufeffGeneratedTokens,Model,ContextTokens,TIMESTAMP\n44,x,374,2023-11-16 18:15:46\n"
    assert read_azure(write_trace(text, "trace.csv")).requests == (WorkloadRequest(0, 374, 44),)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("2023-11-16 18:15:46,374", "374"),
        ("yesterday,374,44", "'yesterday'"),
        ("2023-11-16 18:15:46,many,44", "'many'"),
        ("2023-11-16 18:15:46,0,44", "ContextTokens 0"),
        ("2023-11-16 18:15:46,374,-1", "GeneratedTokens -1"),
        ("2023-11-16 18:15:46,374," + "9" * 5000, "not accepted"),
        ("2023-11-16 18:15:46,-374,44", "ContextTokens -374"),
        ("2023-11-16 18:15:46,99999999999,44", "ContextTokens 99999999999"),
        ("2023-11-16 18:15:46,37.5,44", "'37.5'"),
        ("2023-11-16 18:15:46", "TIMESTAMP,ContextTokens,GeneratedTokens"),
        (",,", "TIMESTAMP ''"),
        (b"2023-11-16 18:15:46,3\xff4,44", "utf-8"),
    ],
)
def test_invalid_azure_line_is_reported_with_its_number(
    write_trace: Callable[..., Path], row: str | bytes, said: str
) -> None:
    raw = row.encode() if isinstance(row, str) else row
    path = write_trace(AZURE.encode() + b"2023-11-16 18:15:46,1,1\n" + raw, "trace.csv")
    with pytest.raises(BadInput) as refusal:
        read_azure(path)
    assert str(refusal.value).startswith(f"{path}, line 3: ")
    assert said in str(refusal.value)


def test_azure_trace_without_header_is_refused(write_trace: Callable[..., Path]) -> None:
    with pytest.raises(BadInput, match=r"line 1: 'a,b,c' is not accepted: the first line is TIMESTAMP,ContextTokens"):
        read_azure(write_trace("a,b,c\n1,2,3\n", "trace.csv"))


@pytest.mark.parametrize(("read", "content"), [(read_mooncake, ""), (read_mooncake, "\n\n"), (read_azure, AZURE)])
def test_empty_or_missing_trace_is_refused(write_trace: Callable[..., Path], read: Read, content: str) -> None:
    with pytest.raises(BadInput, match="contains no requests"):
        read(write_trace(content, "empty"))
    with pytest.raises(BadInput, match="No such file"):
        read(Path("nowhere.jsonl"))


def test_empty_file_is_refused_for_its_missing_azure_header(write_trace: Callable[..., Path]) -> None:
    for content in ("", "\n\n"):
        with pytest.raises(BadInput, match=r"line 1: '' is not accepted: the first line is TIMESTAMP,ContextTokens"):
            read_azure(write_trace(content, "trace.csv"))


def test_prefixes_of_a_trace_are_loaded_from_lower_tiers(write_trace: Callable[..., Path]) -> None:
    """Twelve conversations of 4 texts of 512 tokens come a minute apart; then they continue, the last first."""
    lines = []
    for turn in range(2):
        for talk in range(12):
            ids = [100 * talk + place for place in range(4 + 2 * turn)]
            length, minute = 512 * len(ids) + 10, 23 - talk if turn else talk
            lines.append(
                f'{{"timestamp": {60_000 * minute}, "input_length": {length}, "output_length": 5,'
                f' "hash_ids": {[*ids, 9000 + 12 * turn + talk]}}}'
            )
    workload = read_mooncake(write_trace("\n".join(lines), "trace.jsonl"))

    def hit_rate(**sizes: int) -> float:
        setup = SimulationSetup(
            workload, SimulatedLimits(num_blocks=256, max_model_len=4096), COST, "paged", tiers=SimulatedTiers(**sizes)
        )
        simulation = Simulation(setup)
        simulation.run()
        found = make_report(simulation)
        assert found.prefix_hit_rate is not None
        assert found.tiers is None or found.tiers.loaded_blocks > 0
        return found.prefix_hit_rate

    most = 12 * 2048 / sum(request.num_prompt_tokens for request in workload.requests)
    block_bytes = 16 * 131_072
    assert hit_rate() < most / 4
    assert most / 4 < hit_rate(kv_host_memory=1000 * block_bytes) < most
    # A prompt evicts a little more at once than the disk accepts without a wait: the rest is dropped.
    assert 0.95 * most < hit_rate(kv_host_memory=1000 * block_bytes, kv_disk=4000 * block_bytes) <= most


def test_only_as_many_requests_as_asked_for_are_read(write_trace: Callable[..., Path]) -> None:
    path = write_trace((MOONCAKE + "\n") * 5 + "{", "trace.jsonl")
    assert len(read_mooncake(path, 5).requests) == 5
    azure = write_trace(AZURE + "2023-11-16 18:15:46,1,1\n" * 3 + "bad", "trace.csv")
    assert len(read_azure(azure, 3).requests) == 3
