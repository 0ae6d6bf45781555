"""Tests of number formatting."""

from __future__ import annotations

import math

import pytest

from kvscope_app.ui import number_text as text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "unknown"), (-1, "unknown"), (math.nan, "unknown"), (0, "0 B"), (1536, "1.50 KiB"), (5 << 30, "5.00 GiB")],
)
def test_num_bytes_are_formatted_with_binary_units(value, shown):
    assert text.num_bytes(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0, "0 s"),
        (64e-5, "640 µs"),
        (8.24e-3, "8.2 ms"),
        (0.25, "250 ms"),
        (1.5, "1.50 s"),
        (75, "1:15 min"),
        (7260, "2:01 h"),
    ],
)
def test_durations_are_formatted_with_a_suitable_unit(value, shown):
    assert text.seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.42, "0.4"),
        (12.25, "12.2"),
        (999, "999"),
        (1234, "1\u202f234"),
        (12_500, "12.5 k"),
        (3.4e6, "3.4 M"),
    ],
)
def test_short_numbers_have_three_significant_digits_at_most(value, shown):
    assert text.short(value) == shown


def test_plural_text_adds_an_s_unless_the_count_is_one():
    assert text.plural(1, "block") == "1 block"
    assert text.plural(2000, "block") == "2\u202f000 blocks"


def test_digits_in_a_sentence_are_grouped_except_in_names():
    sentence = "the prompt has 8206 tokens of 8192. tcp://127.0.0.1:7710, request-12345, 0.12345 and 999 stay"
    assert text.grouped(sentence) == (
        "the prompt has 8\u202f206 tokens of 8\u202f192. tcp://127.0.0.1:7710, request-12345, 0.12345 and 999 stay"
    )
