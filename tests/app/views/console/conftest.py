"""Fixtures: a console on a scripted engine."""

from __future__ import annotations

import pytest

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.console.console_view import ConsoleView
from kvscope_telemetry.messages.commands import Accepted, Finished, RequestTiming, Submit, Tokens, Usage


class ConsoleDriver:
    """Console, and the scripted engine behind it."""

    def __init__(self, engine, session, view):
        self.engine, self.session, self.view = engine, session, view
        self.page, self.chat = view.page, view.chat

    @property
    def submits(self):
        return [command for command in self.engine.source.sent if isinstance(command, Submit)]

    @property
    def request_id(self):
        return self.submits[-1].request_id

    @property
    def card(self):
        return self.page.transcript.cards[-1]

    def reply(self, *replies):
        self.engine.source.replies.extend(replies)
        self.session.poll()
        self.chat.flush()

    @property
    def texts(self):
        """Texts of the prompts and answers shown."""
        return [card.body.toPlainText() for card in self.page.transcript.cards]

    def ask(self, prompt, answer=None):
        """Send a prompt, and optionally receive its whole answer."""
        self.page.composer.set_text(prompt)
        self.page.composer.button.click()
        if answer is not None:
            self.token(answer)
            self.finish()

    def accept(self, number=3, request_id=None):
        self.reply(Accepted(request_id=request_id or self.request_id, numbers=(number,), num_prompt_tokens=11))

    def token(self, text, request_id=None):
        self.reply(Tokens(request_id=request_id or self.request_id, token_ids=(1,), text=text))

    def finish(self, reason="stop", request_id=None, stopped_s=0.0, **more):
        usage = Usage(prompt_tokens=11, cached_tokens=8, completion_tokens=4)
        timing = RequestTiming(queue_s=0.0, ttft_s=0.25, total_s=1.75 + stopped_s, stopped_s=stopped_s)
        self.reply(
            Finished(request_id=request_id or self.request_id, finish_reason=reason, usage=usage, timing=timing, **more)
        )


@pytest.fixture
def make_console(engine, session, qtbot, tmp_path):
    def make(shown_session=session):
        view = ConsoleView(shown_session, folder=tmp_path / "conversations")
        qtbot.addWidget(view)
        view.resize(420, 560)
        view.apply_theme(THEMES["dark"])
        with qtbot.waitActive(view):  # shortcuts work only in an active window
            view.show()
            view.activateWindow()
        shown_session.status_changed.emit()
        return ConsoleDriver(engine, shown_session, view)

    return make


@pytest.fixture
def console(make_console):
    return make_console()
