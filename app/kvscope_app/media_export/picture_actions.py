"""Actions that save or copy a picture of a view, and that make a video of the timeline."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QStandardPaths, Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QWidget

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.media_export.picture import PictureStyle, RenderedPicture, copy_picture
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.file_dialogs import ask_save
from kvscope_app.ui.model_name import model_name
from kvscope_app.views.base import View

if TYPE_CHECKING:
    from kvscope_app.media_export.picture_dialog import PictureDialog
    from kvscope_app.media_export.video_dialog import VideoDialog

_NOTICE_MS: Final = 8000
_PICTURE_FILTERS: Final = "PNG picture (*.png);;SVG drawing (*.svg)"


def picture_actions(window: SessionWindow, files: str, clipboard: str) -> list[ActionSpec]:
    """Return actions that save pictures and videos, for menu `files`, and one that copies, for menu `clipboard`.

    Each dock and the page map offer saving and copying a picture in their own context menus as well.
    """
    _add_menus(window)
    return [
        ActionSpec(
            "save_picture",
            "Save picture of this view…",
            files,
            lambda: ask_picture(window, view_in_focus(window)),
            ("Ctrl+Shift+S",),
            tip="As PNG or SVG: the focused view, or the page map",
        ),
        ActionSpec(
            "copy_picture",
            "Copy picture of this view",
            clipboard,
            lambda: copy_view(window, view_in_focus(window)),
            ("Ctrl+Alt+C",),
            starts_section=True,
            tip="To the clipboard: the focused view, or the page map",
        ),
        ActionSpec(
            "save_video",
            "Save video…",
            files,
            partial(ask_video, window),
            tip="A video of the page map, fragmentation or timeline over a range of time",
        ),
    ]


def view_in_focus(window: SessionWindow) -> View:
    widget: QWidget | None = window.focusWidget()
    while widget is not None and not isinstance(widget, View):
        widget = widget.parentWidget()
    return widget if widget is not None and widget.isVisible() else window.page_map


def ask_picture(window: SessionWindow, view: View) -> PictureDialog:
    from kvscope_app.media_export.picture_dialog import PictureDialog  # imported late, so that the window opens sooner

    dialog = PictureDialog(window, view)
    dialog.saved.connect(lambda style: _ask_path(window, view, style))
    dialog.copied.connect(lambda style: copy_view(window, view, style))
    dialog.open()
    return dialog


def save_picture(window: SessionWindow, title: str, picture: RenderedPicture, path: str) -> bool:
    """Write the picture and show the result in the window. Returns whether it was written."""
    failure = picture.save(Path(path))
    if failure:
        window.banner.show_message("The picture could not be saved", f"{path}: {failure}", is_temporary=True)
    else:
        window.statusBar().showMessage(f"Picture of {title} saved to {path}", _NOTICE_MS)
    return not failure


def copy_view(window: SessionWindow, view: View, style: PictureStyle | None = None) -> None:
    copy_picture(view, style)
    window.statusBar().showMessage(f"Picture of {view.title.lower()} copied", _NOTICE_MS)


def ask_video(window: SessionWindow) -> VideoDialog | None:
    """Ask for the options of a video, then for the file name. Returns None if the timeline has no history yet."""
    from kvscope_app.media_export.video_dialog import VideoDialog

    if window.session.timeline.range_ns is None:
        window.statusBar().showMessage("No history to make a video of yet", _NOTICE_MS)
        return None
    dialog = VideoDialog(window, suggested_path(window, "video"))
    dialog.open()
    return dialog


def suggested_path(window: SessionWindow, title: str) -> Path:
    """Return a path without suffix for a picture of the view called `title`, in the user's pictures folder."""
    folder = Path(QStandardPaths.writableLocation(QStandardPaths.StandardLocation.PicturesLocation))
    model = re.sub(r"[^\w.-]+", "-", model_name(window.session.mirror.hello)).strip("-") or "kvscope"
    return folder / f"{model}-{title.lower().replace(' ', '-')}"


def _ask_path(window: SessionWindow, view: View, style: PictureStyle) -> None:
    path, picture = suggested_path(window, view.title), RenderedPicture.of(view, style)
    save = partial(save_picture, window, view.title, picture)
    ask_save(window, f"Save a picture of {view.title.lower()}", path, _PICTURE_FILTERS, save)


def _add_menus(window: SessionWindow) -> None:
    _add_menu(window, window.page_map, "page_map")
    for name, dock in window.docks.items():
        _add_menu(window, dock, name)


def _add_menu(window: SessionWindow, widget: QWidget, name: str) -> None:
    """Add the actions to save and copy a picture to the context menu of `widget` and of its children without a menu."""
    for text, run in (("Save picture of this view…", ask_picture), ("Copy picture of this view", copy_view)):
        action = QAction(text, widget)
        action.triggered.connect(partial(_run_on_view, window, name, run))
        widget.addAction(action)
    widget.setContextMenuPolicy(Qt.ContextMenuPolicy.ActionsContextMenu)


def _run_on_view(window: SessionWindow, name: str, run: object, _checked: bool = False) -> None:
    """Call `run` on the view called `name` if it exists already. Views are created after their docks."""
    if name in window.views and callable(run):
        run(window, window.views[name])
