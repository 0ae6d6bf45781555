"""Hit rates, shared prefixes and early differences of request files, with numbers calculated by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from kvscope_engine.analysis.analysis_page import analysis_page
from kvscope_engine.analysis.analysis_report import PromptAnalysis
from kvscope_engine.analysis.analysis_text import analysis_text
from kvscope_engine.analysis.cache_simulation import SimulatedCache
from kvscope_engine.analysis.prompt_analysis import AnalysisOptions, analyze_file
from kvscope_engine.analysis.prompt_tokens import PromptEncoder
from kvscope_engine.cli.main import main
from kvscope_engine.tokenization.tokenizer import FastCodec, Tokenizer
from kvscope_telemetry.errors import BadInput

Analyze = Callable[..., PromptAnalysis]


def word_encoder() -> PromptEncoder:
    """Encoder with a token for each of the words w0, w1 …"""
    codec = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{index}": index for index in range(1000)}, "w999"))
    codec.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PromptEncoder(Tokenizer(FastCodec(codec), {}))


@pytest.fixture
def analyze(tmp_path: Path) -> Analyze:
    """Function that analyses a file with these lines: `analyze(records, **options)`."""

    def run(records: list[Any], **options: Any) -> PromptAnalysis:
        path = tmp_path / "requests.jsonl"
        path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records))
        return analyze_file(path, AnalysisOptions(**options), word_encoder, "words")

    return run


def tokens(*parts: range) -> dict[str, Any]:
    return {"prompt": [token for part in parts for token in part]}


def test_hit_rates_and_prefixes_are_those_calculated_by_hand(analyze: Analyze) -> None:
    """Of 40 + 40 + 24 tokens, the second prompt finds 32 and the third 16: its last block is not complete without its
    last token.
    """
    found = analyze([tokens(range(40)), tokens(range(32), range(50, 58)), tokens(range(24))], block_size=8)
    assert (found.num_prompts, found.num_tokens, found.longest_prompt_tokens) == (3, 104, 40)
    assert found.unbounded_hit_rate == 48 / 104
    assert {each.block_size: each.hit_rate for each in found.block_sizes}[32] == 32 / 104
    assert [(each.depth, each.num_prompts, each.start_token, each.num_tokens) for each in found.prefixes] == [
        (0, 3, 0, 24),
        (1, 2, 24, 8),
    ]
    assert found.prefixes[0].text.startswith("w0 w1 w2")
    assert found.pools[-1].hit_rate == found.unbounded_hit_rate
    assert "46.2 %" in analysis_text(found)
    assert "<svg" in analysis_page(found)


def test_pool_that_is_too_small_evicts_the_end_of_the_older_prompt_first() -> None:
    """A pool of 5 blocks holds one prompt of 3 blocks and 2 of the other."""
    cache, first, second = SimulatedCache(5, 8), [1, 2, 3], [11, 12, 13]
    assert [cache.run(first, 25), cache.run(second, 25)] == [0, 0]
    assert cache.run(first, 25) == 8
    assert cache.run(list(range(6)), 48) is None


def test_time_in_the_system_prompt_is_named_with_what_it_costs(analyze: Analyze) -> None:
    records = [tokens(range(10), range(500 + number, 501 + number), range(100, 190)) for number in range(5)]
    found = analyze(records, block_size=8)
    assert found.unbounded_hit_rate == 4 * 8 / 505
    assert found.differences is not None
    assert (found.differences.num_prompts, found.differences.median_start_token) == (4, 10)
    assert found.differences.hit_rate_without == 4 * 96 / 505
    assert (found.differences.examples[0].earlier, found.differences.examples[0].later) == ("w500", "w501")
    assert "4 prompts differ" in analysis_text(found)


def test_only_prompts_that_lose_cached_tokens_count_as_early_differences(analyze: Analyze) -> None:
    """The prompts of lines 4, 7 and 8 differ early from the one before, and are cached from an earlier line: 80 of
    their 85 tokens are in whole blocks.
    """
    timed = [tokens(range(10), range(500 + number, 501 + number), range(100, 174)) for number in range(3)]
    other = tokens(range(700, 703), range(100, 174))
    records = [timed[0], tokens(range(800, 830)), timed[1], timed[0], timed[2], other, timed[1], timed[2]]
    found = analyze(records, block_size=8).differences
    assert found is not None
    assert (found.num_prompts, found.median_start_token) == (2, 5)
    assert [example.line for example in found.examples] == [5, 6]


def test_single_early_difference_and_functions_are_described_in_the_singular(analyze: Analyze) -> None:
    found = analyze([tokens(range(10), range(500 + number, 501 + number), range(100, 174)) for number in range(2)])
    assert "1 prompt differs from the one before" in analysis_text(found)
    message = {"role": "user", "content": "w1"}
    chat = analyze([{"messages": [message], "tools": [{"type": "function"}]}, {"messages": [message]}])
    assert "are not part of the prompts: 1 prompt has some." in analysis_text(chat)
    assert "No shared prefix saves 0.1 %" in analysis_page(chat)


def test_deeply_nested_line_is_left_out(analyze: Analyze) -> None:
    nested = [f'{{"prompt": {"[" * depth}1{"]" * depth}}}' for depth in (3, 700, 940, 5000)]
    assert analyze([*nested, tokens(range(20))]).num_skipped_lines == 4


def test_broken_lines_are_left_out_and_counted(analyze: Analyze) -> None:
    found = analyze(["{broken", tokens(range(20)), {"foo": 1}, {"hash_ids": [1], "input_length": 512}])
    assert (found.num_prompts, found.num_skipped_lines) == (1, 3)
    assert found.problems[0].startswith("line 1: no JSON")
    assert "together" in found.problems[2]
    assert "left out: 3 (line 1: no JSON" in analysis_text(found)


def test_mooncake_trace_is_analysed_by_its_hashes(analyze: Analyze) -> None:
    line = {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]}
    found = analyze([line, line])
    assert (found.block_size, found.tokenizer, found.unbounded_hit_rate) == (512, "", 1024 / 3000)
    with pytest.raises(BadInput, match="block_size=16 is not accepted"):
        analyze([line], block_size=16)


def test_array_of_conversations_is_read_like_lines(analyze: Analyze) -> None:
    conversation = {"conversations": [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}]}
    found = analyze([json.dumps([conversation, conversation, {}], indent=1)])
    assert found.num_prompts == 2
    assert found.problems[0].startswith("record 3: ")


def test_analysis_is_printed_if_its_page_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"hash_ids": [1], "input_length": 600}) + "\n")
    assert main(["analyze", str(path), "--html", str(tmp_path / "missing" / "page.html")]) == 1
    printed = capsys.readouterr()
    assert "1 prompt with 600 tokens" in printed.out
    assert "cannot be written" in printed.err


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        ("", [], "contains no prompt"),
        ("{}\n", [], "contains no prompt.*line 1"),
        ("[{", [], "cannot be read"),
        ('{"prompt": [1]}', ["--block-size", "0"], "block_size=0"),
        ('{"prompt": [1]}', ["--pool-blocks", "0"], "pool_blocks=0"),
        ('{"prompt": [1]}', ["--requests", "0"], "requests=0"),
        ('{"prompt": [1]}', ["--model", "no/such/model"], "model 'no/such/model'"),
    ],
)
def test_files_and_options_that_are_not_accepted_are_refused_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, options: list[str], named: str
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    assert main(["analyze", str(path), *options]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert re.search(named, errors[0])
