"""View of the console: tabs for chat and load generator. Decides where and when conversations are saved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar, Final

from PySide6.QtCore import QCoreApplication, QSettings, QStandardPaths
from PySide6.QtGui import QHideEvent
from PySide6.QtWidgets import QTabWidget, QVBoxLayout, QWidget

from kvscope_app.session.chat_turns import ChatTurn
from kvscope_app.session.session import Session
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import empty_state
from kvscope_app.views.base import View
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.chat_page import ChatPage
from kvscope_app.views.console.console_commands import ConsoleCommands
from kvscope_app.views.console.conversation_store import ConversationStore
from kvscope_app.views.console.load_view import LoadView
from kvscope_app.views.console.turn_index import TurnIndex

STATUS_INTERVAL_S: Final = 5.0
NO_ENGINE_TO_PROMPT: Final = "This is a recording: there is no engine to prompt."


class ConsoleView(View):
    """Tabs for chat and load generator, or an explanation if a recording is shown.

    `folder` is where conversations are stored, by default the application's data folder.
    """

    title: ClassVar[str] = "Console"
    object_name: ClassVar[str] = "console"
    refresh_hz: ClassVar[float] = 4.0

    def __init__(self, session: Session, parent: QWidget | None = None, folder: Path | None = None) -> None:
        super().__init__(session, parent)
        self._last_status_request_s = -STATUS_INTERVAL_S
        self.chat = Chat(session, ConversationStore(folder or _data_folder()), self)
        self.page = ChatPage(session, self.chat)
        self.page.done.connect(self.done)
        self.commands = ConsoleCommands(self.page)
        session.chat_turns.set_lookup(TurnIndex(self.chat).find)
        self.load = LoadView(session)
        session.chat_turns.show_requested.connect(self.show_turn)
        self._tabs = QTabWidget()
        self._tabs.setDocumentMode(True)
        self._tabs.addTab(self.page, "Chat")
        self._tabs.addTab(self.load, "Load")
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self._tabs)
        if session.timeline.is_file:
            layout.addWidget(empty_state(NO_ENGINE_TO_PROMPT))
            self._tabs.hide()
        self.setFocusProxy(self.page.composer.edit)
        application = QCoreApplication.instance()
        if application is not None:
            application.aboutToQuit.connect(self.chat.save)

    def restore_settings(self, settings: QSettings) -> None:
        self.load.restore_settings(settings)

    def save_settings(self, settings: QSettings) -> None:
        self.load.save_settings(settings)

    def new_conversation(self) -> None:
        self._tabs.setCurrentWidget(self.page)
        self.page.new_conversation()

    def show_turn(self, turn: ChatTurn) -> None:
        self._tabs.setCurrentWidget(self.page)
        self.page.show_turn(turn)

    def rename(self) -> None:
        self._tabs.setCurrentWidget(self.page)
        self.page.rename()

    def delete(self) -> None:
        self.page.delete()

    def run_command(self, name: str) -> None:
        """Show the chat, and call a method of `ConsoleCommands`."""
        self._tabs.setCurrentWidget(self.page)
        getattr(self.commands, name)()

    def refresh(self) -> None:
        self._request_status()
        self.page.show_status()
        self.load.refresh()

    def _request_status(self) -> None:
        """Request the engine's status, which is the only source of the LoRA adapters that the engine has
        loaded. Called regularly.
        """
        now_s = time.monotonic()
        if self.session.accepts_prompts and now_s - self._last_status_request_s >= STATUS_INTERVAL_S:
            self._last_status_request_s = now_s
            self.session.request_status()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.page.apply_theme(theme)
        self.load.apply_theme(theme)

    def shut_down(self) -> None:
        self.closing_message = self.chat.shut_down()

    def hideEvent(self, event: QHideEvent) -> None:
        self.chat.save()
        super().hideEvent(event)


def _data_folder() -> Path:
    location = QStandardPaths.StandardLocation.AppDataLocation
    return Path(QStandardPaths.writableLocation(location)) / "conversations"
