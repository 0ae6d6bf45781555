"""The console: chat with the engine, several conversations at once, and the load beside it."""

from kvscope_app.views.console.view import ConsoleView

__all__ = ["ConsoleView"]
