"""Commands on the shown conversation, which `console_actions` lists with their keys."""

from __future__ import annotations

from PySide6.QtGui import QGuiApplication

from kvscope_app.views.console.chat_page import ChatPage
from kvscope_app.views.console.conversation import Message


class ConsoleCommands:
    """Commands on the conversation that `page` shows."""

    def __init__(self, page: ChatPage) -> None:
        self._page = page

    def search(self) -> None:
        self._page.search.start()

    def show_next(self) -> None:
        self._move(1)

    def show_previous(self) -> None:
        self._move(-1)

    def stop(self) -> None:
        self._page.chat.stop(self._page.current)

    def copy_answer(self) -> None:
        answer = self._last_answer()
        if answer is None or not answer.content:
            self._page.show_message("There is no answer to copy.")
            return
        QGuiApplication.clipboard().setText(answer.content)
        self._page.show_message("The last answer was copied.")

    def regenerate(self) -> None:
        answer = self._last_answer()
        if answer is None:
            self._page.show_message("There is no answer to regenerate.")
        elif blocked := self._page.why_blocked():
            self._page.show_message(blocked)
        else:
            self._page.regenerate(answer)

    def attach_files(self) -> None:
        self._page.attachments.ask_files()

    def export(self) -> None:
        self._page.files.ask_export(self._page.current)

    def export_all(self) -> None:
        self._page.files.ask_export_all()

    def import_file(self) -> None:
        self._page.files.ask_import()

    def _move(self, step: int) -> None:
        conversations = self._page.chat.conversations
        if self._page.current in conversations:
            self._page.show_row(conversations.index(self._page.current) + step)

    def _last_answer(self) -> Message | None:
        return next((message for message in reversed(self._page.current.path) if message.role == "assistant"), None)
