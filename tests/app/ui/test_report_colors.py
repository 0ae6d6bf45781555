"""Tests that reports use the colours of the desktop."""

from __future__ import annotations

import re

import pytest

from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.throughput.panels import PANELS
from kvscope_app.views.timeline.lane_colors import PHASE_COLORS
from kvscope_telemetry.exports.report import inks
from kvscope_telemetry.exports.report.report_page import page
from kvscope_telemetry.request_phase import RequestPhase

PAIRS = [(LIGHT, inks.LIGHT), (DARK, inks.DARK)]


@pytest.mark.parametrize(("theme", "report"), PAIRS, ids=["light", "dark"])
def test_report_colors_equal_those_of_the_theme(theme, report):
    same = {"page": "window", "edge": "border", "text": "text", "soft": "muted", "grid": "grid", "free": "block_free"}
    same |= {
        "active": "block_active",
        "cached": "block_cached",
        "evicted": "flash_evicted",
        "bookmark": "accent",
        "alarm": "warn",
    }
    assert {name: report[name] for name in same} == {name: getattr(theme, own) for name, own in same.items()}


@pytest.mark.parametrize(("theme", "report"), PAIRS, ids=["light", "dark"])
def test_report_curves_have_the_colors_of_the_throughput_view(theme, report):
    curves = {curve.name: curve.color_of(theme) for spec in PANELS for curve in spec.curves}
    same = {"decode": "decode_tokens", "prefill": "prefill_tokens", "running": "num_running", "waiting": "num_waiting"}
    assert {name: report[name] for name in same} == {name: curves[own] for name, own in same.items()}


@pytest.mark.parametrize(("theme", "report"), PAIRS, ids=["light", "dark"])
def test_report_phases_have_the_colors_of_the_timeline(theme, report):
    same = {"queued": RequestPhase.QUEUED, "active": RequestPhase.PREFILL, "decoding": RequestPhase.DECODE}
    same |= {"preempted": RequestPhase.PREEMPTED, "swapped": RequestPhase.SWAPPED}
    assert {n: report[n] for n in same} == {n: getattr(theme, PHASE_COLORS[phase]) for n, phase in same.items()}


def test_report_page_defines_every_color_it_uses():
    text = page("title", ["<p>body</p>"])
    used, defined = set(re.findall(r"var\(--([a-z]+)\)", text)), set(re.findall(r"--([a-z]+):", text))
    assert used <= defined
