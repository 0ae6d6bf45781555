"""Tests of constant curves, which are redrawn less often."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from kvscope_app.session.history import HistoryWindow
from kvscope_app.views.throughput import throughput_view as view_module
from kvscope_app.views.throughput.panels import is_constant


def history_window(**columns):
    (num,) = {column.size for column in columns.values()}
    return HistoryWindow(np.arange(num) / 10.0, columns, 10**12)


def test_changing_curve_is_not_constant():
    zeros, unknown = np.zeros(100), np.full(100, np.nan)
    assert is_constant(history_window(a=zeros, b=unknown, c=zeros + 7))
    step = zeros.copy()
    step[50:] = 1
    assert not is_constant(history_window(a=zeros, b=step))
    begun = unknown.copy()
    begun[30:] = 0
    assert not is_constant(history_window(a=begun))


def test_curve_with_unknown_values_only_in_the_newest_second_is_still_constant():
    late = np.zeros(100)
    late[-7:] = np.nan
    assert is_constant(history_window(a=late))
    late[-30:] = np.nan
    assert not is_constant(history_window(a=late))
    assert not is_constant(history_window(a=np.zeros(5)))


def test_constant_curves_are_redrawn_less_often(engine, session, view, monkeypatch):
    now_ns = [time.monotonic_ns()]
    clock = SimpleNamespace(monotonic=lambda: now_ns[0] / 1e9, monotonic_ns=lambda: now_ns[0])
    monkeypatch.setattr(view_module, "time", clock)
    drawn = []
    draw = view.charts._draw_panels
    monkeypatch.setattr(view.charts, "_draw_panels", lambda names, span: (drawn.append(names), draw(names, span)))

    def times_in_a_minute(*, is_constant):
        monkeypatch.setattr(view_module, "is_constant", lambda _: is_constant)
        view.charts.refresh_all()
        drawn.clear()
        for _ in range(30):
            now_ns[0] += 2_000_000_000
            view.refresh()
        return len(drawn)

    assert 12 <= times_in_a_minute(is_constant=False) <= 16
    assert 5 <= times_in_a_minute(is_constant=True) <= 8


def test_constant_curves_are_redrawn_when_the_mouse_enters(session, view, monkeypatch):
    drawn, draw_all = [], view.charts.refresh_all
    monkeypatch.setattr(view.charts, "refresh_all", lambda: drawn.append(1))
    monkeypatch.setattr(view_module, "is_constant", lambda _: True)
    draw_all()
    view.charts.show_values_at(1.0)
    view.charts.show_values_at(2.0)
    assert len(drawn) == 1, "redrawn when the mouse enters, not on each move"
    view.charts.show_values_at(None)
    monkeypatch.setattr(view_module, "is_constant", lambda _: False)
    draw_all()
    view.charts.show_values_at(1.0)
    assert len(drawn) == 1
