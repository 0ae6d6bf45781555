"""Actions of the debugger: their menu entries, their targets, and the reasons why they are disabled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from PySide6.QtCore import QObject
from PySide6.QtGui import QCursor
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QPushButton, QToolTip, QWidget
from shiboken6 import isValid

from kvscope_app.actions.action_registry import Actions, ActionSpec
from kvscope_app.debugger import permission
from kvscope_app.debugger.adapters_dialog import AdaptersDialog
from kvscope_app.debugger.debugger import Debugger
from kvscope_app.debugger.pin_limits import why_pins_refused
from kvscope_app.session.session import Session
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.number_fields import WholeNumberBox
from kvscope_app.ui.number_text import count
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.widget_factories import label, set_look
from kvscope_app.views.block_locations import locate_block
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import MAX_TEXT_BLOCKS, Evict, Pin, Preempt, SetLimits, Unpin

_LIMITS = (
    ("max_num_seqs", "Max requests per step"),
    ("max_num_batched_tokens", "Max tokens per step"),
)
DEBUG: Final = "Debug"
NUM_STEPS: Final = 10
REQUEST_ACTIONS: Final = ("preempt_swap", "preempt_recompute", "abort_request", "pin_request", "evict_request")
BLOCK_ACTIONS: Final = ("pin_block", "pin_prefix", "unpin_block", "evict_block")
_NOTICE_MS: Final = 6000


def debug_actions(window: SessionWindow, debugger: Debugger) -> list[ActionSpec]:
    commands = _Commands(window, debugger)
    return [
        *_engine_actions(window.session, debugger),
        *_request_actions(window, commands),
        *_block_actions(window, commands),
        *_pool_actions(window, debugger, commands),
    ]


def _engine_actions(session: Session, debugger: Debugger) -> list[ActionSpec]:
    control = debugger.control
    why_not_step = partial(permission.why_not_step, session)
    steps_text = f"Run {NUM_STEPS} steps"
    return [
        ActionSpec(
            "pause_engine",
            "Pause engine",
            DEBUG,
            partial(control, "pause"),
            ("F9",),
            "pause",
            why_not=lambda: permission.why_not_control(session),
        ),
        ActionSpec(
            "step", "Run one step", DEBUG, partial(control, "step"), ("F10",), "frame-forward", why_not=why_not_step
        ),
        ActionSpec(
            "step_more", steps_text, DEBUG, partial(control, "step", NUM_STEPS), ("Ctrl+F10",), why_not=why_not_step
        ),
        ActionSpec(
            "resume",
            "Resume engine",
            DEBUG,
            partial(control, "resume"),
            ("Shift+F9",),
            "play",
            why_not=lambda: permission.why_not_resume(session, is_paused_by_us=debugger.is_paused_by_us),
        ),
    ]


def _request_actions(window: SessionWindow, commands: _Commands) -> list[ActionSpec]:
    session = window.session

    def why_not_preempt() -> str:
        return permission.why_not_preempt(session.mirror, session.selection.request)

    def why_not_swap() -> str:
        return permission.why_not_swap(session.mirror, session.selection.request)

    return [
        commands.selection_action(
            "preempt_swap",
            "Preempt the selected request (swap)",
            partial(commands.preempt, "swap"),
            why_not_swap,
            starts_section=True,
        ),
        commands.selection_action(
            "preempt_recompute",
            "Preempt the selected request (recompute)",
            partial(commands.preempt, "recompute"),
            why_not_preempt,
        ),
        commands.selection_action(
            "abort_request",
            "Abort the selected request…",
            commands.abort,
            lambda: permission.why_not_abort(session.mirror, session.selection.request),
            shortcuts=("Del",),
            tip="Abort the selected request, even if another client sent it",
            focus_dock="requests",
            question=commands.abort_question,
        ),
        commands.selection_action(
            "pin_request",
            "Pin cached blocks of the selected request",
            commands.pin_request,
            commands.why_not_pin_request,
        ),
        commands.selection_action(
            "evict_request",
            "Evict cached blocks of the selected request",
            commands.evict_request,
            lambda: _why_not_blocks(
                idle_blocks(window), commands.why_no_cached_blocks(" that are unused and not pinned")
            ),
        ),
    ]


def _block_actions(window: SessionWindow, commands: _Commands) -> list[ActionSpec]:
    session = window.session

    def why_not_pin(*, with_prefix: bool = False) -> str:
        return permission.why_not_pin(session.mirror, current_block(window), with_prefix=with_prefix)

    return [
        commands.selection_action(
            "pin_block", "Pin the block", partial(commands.pin, with_prefix=False), why_not_pin, starts_section=True
        ),
        commands.selection_action(
            "pin_prefix", "Pin the block and its prefix", commands.pin, partial(why_not_pin, with_prefix=True)
        ),
        commands.selection_action(
            "unpin_block",
            "Unpin the block",
            commands.unpin,
            lambda: permission.why_not_unpin(session.mirror, current_block(window)),
        ),
        commands.selection_action(
            "evict_block",
            "Evict the block from the prefix cache",
            commands.evict,
            lambda: permission.why_not_evict(session.mirror, current_block(window)),
        ),
    ]


def _pool_actions(window: SessionWindow, debugger: Debugger, commands: _Commands) -> list[ActionSpec]:
    why_not_unpin = partial(permission.why_not_unpin_all, window.session)
    unpin_own = partial(commands.unpin_all, of_all_clients=False)
    unpin_of_all = partial(commands.unpin_all, of_all_clients=True)
    return [
        ActionSpec(
            "unpin_all", "Unpin all (this window's)", DEBUG, unpin_own, starts_section=True, why_not=why_not_unpin
        ),
        ActionSpec("unpin_anyones", "Unpin all (everyone's)", DEBUG, unpin_of_all, why_not=why_not_unpin),
        ActionSpec(
            "limits",
            "Batch limits…",
            DEBUG,
            lambda: LimitsDialog(window, debugger).show(),
            why_not=lambda: permission.why_not_limit(window.session),
        ),
        ActionSpec(
            "adapters",
            "LoRA adapters…",
            DEBUG,
            lambda: AdaptersDialog(window, debugger).show(),
            why_not=lambda: permission.why_not_adapters(window.session),
        ),
    ]


class _Commands:
    def __init__(self, window: SessionWindow, debugger: Debugger) -> None:
        self._window, self._debugger = window, debugger
        self._chosen_number: int | None = None
        """Number of the request that the confirmation dialog names; None to abort the selected request."""

    def selection_action(
        self, name: str, text: str, run: Callable[[], object], why_not: Callable[[], str], **more: Any
    ) -> ActionSpec:
        """Return an action on the selected request or current block. The text of the action contains the
        request or block number.
        """
        return ActionSpec(
            name,
            text,
            DEBUG,
            run,
            why_not=lambda: permission.why_not_act(self._window.session) or why_not(),
            text_now=lambda: self.text_with_target(text),
            **more,
        )

    def preempt(self, how: str) -> None:
        number = self._window.session.selection.request
        if number is not None:
            self._debugger.send_command(Preempt, number=number, how=how)

    def abort(self) -> None:
        number = self._chosen_number if self._chosen_number is not None else self._window.session.selection.request
        if number is not None:
            self._debugger.abort(number, self._window.session.mirror.requests.request_id(number))

    def abort_question(self) -> str:
        """Return the question that confirms an abort, or "" if the selected request cannot be aborted."""
        session = self._window.session
        number = session.selection.request
        if number is None or permission.why_not_abort(session.mirror, number):
            self._chosen_number = None
            return ""
        self._chosen_number = number  # the selection may change before the user answers
        name = session.mirror.requests.request_id(number)
        return f"Abort request {name}? Tokens generated so far are kept."

    def pin_request(self) -> None:
        self._debugger.send_command(Pin, blocks=cached_blocks(self._window))

    def why_not_pin_request(self) -> str:
        mirror, blocks = self._window.session.mirror, cached_blocks(self._window)
        reason = permission.why_no_pins(mirror) or _why_not_blocks(blocks, self.why_no_cached_blocks())
        return reason or why_pins_refused(mirror, blocks)

    def evict_request(self) -> None:
        self._debugger.send_command(Evict, blocks=idle_blocks(self._window))

    def pin(self, *, with_prefix: bool = True) -> None:
        self._debugger.send_command(Pin, blocks=(current_block(self._window),), with_prefix=with_prefix)

    def unpin(self) -> None:
        self._debugger.send_command(Unpin, blocks=(current_block(self._window),), anyones=True)

    def evict(self) -> None:
        self._debugger.send_command(Evict, blocks=(current_block(self._window),))

    def unpin_all(self, *, of_all_clients: bool) -> None:
        self._debugger.send_command(Unpin, anyones=of_all_clients)

    def text_with_target(self, text: str) -> str:
        session, block = self._window.session, current_block(self._window)
        if session.selection.request is not None:
            text = text.replace("the selected request", f"request #{session.selection.request}")
        if session.mirror.hello is None or not 0 <= block < session.mirror.num_rows:
            return text
        return text.replace("the block", locate_block(session.mirror.hello.cache, block).name.lower())

    def why_no_cached_blocks(self, qualifier: str = "") -> str:
        """Return a reason such as "Request #3 has no cached blocks".

        The text in `qualifier`, for example " that are not pinned", is appended and says which cached blocks are meant.
        """
        number = self._window.session.selection.request
        return "No request is selected" if number is None else f"Request #{number} has no cached blocks{qualifier}"


def current_block(window: SessionWindow) -> int:
    """Return the block of the page map that was last clicked or reached by keyboard, or -1 if there is none."""
    return window.page_map.canvas.current_block


def cached_blocks(window: SessionWindow) -> tuple[int, ...]:
    """Return the pool blocks that the selected request wrote or references and that the prefix cache can find."""
    mirror, number = window.session.mirror, window.session.selection.request
    if number is None:
        return ()
    referenced = mirror.requests.blocks(number)
    pool = slice(0, mirror.num_blocks)
    is_own = mirror.ledger.owner[pool] == number
    is_own[referenced[referenced < mirror.num_blocks]] = True
    return _block_ids(is_own & (mirror.ledger.hash[pool] != 0))


def idle_blocks(window: SessionWindow) -> tuple[int, ...]:
    """Return the selected request's cached blocks (`cached_blocks`) that no request references and that are
    not pinned.
    """
    mirror = window.session.mirror
    blocks = cached_blocks(window)
    return tuple(b for b in blocks if mirror.ledger.state[b] == BlockState.CACHED and b not in mirror.pinned)


class DebugAnswers(QObject):
    """Shows the engine's replies to commands in the status bar and, after a menu action, in a tooltip at the mouse
    position.
    """

    def __init__(self, window: SessionWindow, debugger: Debugger, actions: Actions) -> None:
        super().__init__(window)
        self._window = window
        for name in (*REQUEST_ACTIONS, *BLOCK_ACTIONS):
            actions[name].triggered.connect(self._remember_position)
        self._menu_position = QCursor.pos()
        self._is_from_menu = False
        debugger.answered.connect(self._show_answer)

    def _remember_position(self) -> None:
        self._menu_position, self._is_from_menu = QCursor.pos(), True

    def _show_answer(self, text: str, _was_done: bool) -> None:
        self._window.statusBar().showMessage(text, _NOTICE_MS)
        if self._is_from_menu and self._window.isActiveWindow():
            QToolTip.showText(self._menu_position, text, self._window)
        self._is_from_menu = False


def _block_ids(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())


def _why_not_blocks(blocks: tuple[int, ...], why_none: str) -> str:
    """Return why `blocks` cannot be sent in one command: too many, or none (`why_none`). "" if they can."""
    if len(blocks) > MAX_TEXT_BLOCKS:
        return f"{len(blocks)} blocks are selected: one command accepts at most {MAX_TEXT_BLOCKS}"
    return "" if blocks else why_none


class LimitsDialog(Sheet):
    """Dialog that changes the batch limits while the engine runs, and shows the engine's answer.

    The dialog is not modal, so the effect is visible in the views behind it.
    """

    def __init__(self, parent: QWidget, debugger: Debugger) -> None:
        super().__init__("Batch limits", parent)
        self._debugger = debugger
        text = label(
            "Takes effect at the next step and lasts until the engine stops. Running requests are not "
            "preempted; new ones wait until the batch fits.",
            "muted",
            wraps=True,
        )
        self.fields = {name: WholeNumberBox() for name, _ in _LIMITS}
        self.answer = label("", "muted", wraps=True)
        self.column.addWidget(text)
        self.column.addLayout(self._grid())
        self.column.addWidget(self.answer)
        self.column.addLayout(self._buttons())
        self.resize_comfortably(460, 220)

    def apply(self) -> None:
        num_seqs, num_tokens = (field.value() for field in self.fields.values())
        self._debugger.send_command(
            SetLimits, on_answer=self._on_answer, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens
        )

    def _on_answer(self, text: str, was_done: bool) -> None:
        if not isValid(self):  # the dialog was closed before the answer arrived
            return
        self.answer.setText(text)
        set_look(self.answer, "accent" if was_done else "warning")

    def _grid(self) -> QGridLayout:
        grid = QGridLayout()
        grid.setColumnStretch(0, 1)
        grid.setVerticalSpacing(8)
        mirror = self._debugger.session.live_mirror
        cache = None if mirror.hello is None else mirror.hello.cache
        for row, ((name, text), current) in enumerate(zip(_LIMITS, mirror.limits, strict=True)):
            maximum = 0 if cache is None else int(getattr(cache, name))
            field = self.fields[name]
            field.setRange(1, max(1, maximum, current))
            field.setValue(current or maximum)
            field.setAccessibleName(text)
            field.setMinimumWidth(110)
            name_label = label(text)
            name_label.setToolTip(name)
            grid.addWidget(name_label, row, 0)
            grid.addWidget(field, row, 1)
            grid.addWidget(label(f"of {count(max(maximum, current))}", "muted"), row, 2)
        return grid

    def _buttons(self) -> QHBoxLayout:
        apply, close = QPushButton("Apply"), QPushButton("Close")
        apply.setProperty("look", "primary")
        apply.setDefault(True)
        apply.clicked.connect(self.apply)
        close.clicked.connect(self.close)
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(close)
        row.addWidget(apply)
        return row
