"""Tests of Markdown that is rendered while it grows, and of the frames around code."""

from __future__ import annotations

import pytest
import shiboken6
from hypothesis import given, settings
from hypothesis import strategies as st
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication, QTextCursor
from tests.conftest import examples

from kvscope_app.ui.theme import SAFE_THEMES, THEMES, contrast_ratio
from kvscope_app.views.console.code_colors import code_background, code_palette
from kvscope_app.views.console.code_frames import CodeHeader
from kvscope_app.views.console.text_body import TextBody

CODE = "\n\ndef f(x):  \n    return 'a'\n\n\nf(1)"
PARTS = [
    "# Title\ntext with **bold** and `code`\nnext line",
    "1. one\n2. two\n   ```bash\n   pip install x\n\n   pip list\n   ```\n3. three\n\n4. four",
    f"Code:\n```python\n{CODE}\n```\n```\nplain\n```",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "> quote\n> ```js\n> let x = 1\n> ```",
    "$$\na\n\nb\n$$",
    "  ~~~sh\n  ls\n    cd\n  ~~~",
    "- a\n  - b\n\n---\n\nsee [link][1]",
    "one\r\ntwo\r\n\r\n```\r\nx\r\n\r\n```",
]
LINES = (
    *("# title", "**b** _i_ `c`", "- a", "  - b", "1. one", "2) two", "   more", "", "    code", "> q", "> ```", "***"),
    *(
        "```py",
        "x = 1  # 😀 c",
        "```",
        "~~~",
        "| a | b |",
        "|---|---|",
        "---",
        "===",
        "$$",
        "\\[",
        "\\]",
        "<b>",
        "![i](u)",
    ),
    *("\ttab", "`` ` ``", "end  ", "\\", "&amp;", "a\u2028b", "\r", "'''", "/*", "<think>", "[1]: http://x", "[a][1]"),
)


@pytest.fixture
def make_body(qtbot):
    def make():
        body = TextBody("Answer")
        qtbot.addWidget(body)
        body.resize(400, 300)
        return body

    return make


@pytest.fixture
def body(make_body):
    return make_body()


def paragraphs(body):
    block, result = body.document().begin(), []
    while block.isValid():
        block_format, item = block.blockFormat(), block.textList()
        colors = [(part.start, part.length, part.format.foreground().color()) for part in block.layout().formats()]
        margins = (block_format.topMargin(), block_format.bottomMargin(), block_format.leftMargin())
        result.append((block.text(), margins, item.itemText(block) if item else "", colors))
        block = block.next()
    return result


def headers(body):
    return [header for header in body.findChildren(CodeHeader) if not header.isHidden()]


def stream(body, text, step=3):
    for end in range(step, len(text), step):
        body.show_markdown(text[:end], is_complete=False)


@pytest.mark.parametrize("text", [*PARTS, "\n\n".join(PARTS), "\n\n".join([*PARTS, "[1]: http://x.org/y"])])
def test_streamed_markdown_looks_as_if_it_was_rendered_whole(make_body, text):
    streamed, whole = make_body(), make_body()
    stream(streamed, text)
    for each in (streamed, whole):
        each.show_markdown(text)
    assert paragraphs(streamed) == paragraphs(whole)
    assert [header.language.text() for header in headers(streamed)] == [
        header.language.text() for header in headers(whole)
    ]


@settings(max_examples=examples(12), deadline=None)
@given(lines=st.lists(st.sampled_from(LINES), max_size=20), step=st.integers(1, 9))
def test_any_streamed_text_looks_as_if_it_was_rendered_whole(qapp, lines, step):
    text = "\n".join(lines)
    streamed, whole = TextBody("Answer"), TextBody("Answer")
    stream(streamed, text, step)
    for each in (streamed, whole):
        each.show_markdown(text)
    assert paragraphs(streamed) == paragraphs(whole)
    for each in (streamed, whole):
        shiboken6.delete(each)


def test_markdown_is_rendered_before_the_answer_is_complete(body):
    body.show_markdown("**one** and\n\n```py\nx = 1", is_complete=False)
    assert body.toPlainText() == "one and\nx = 1"
    assert [header.language.text() for header in headers(body)] == ["py"]


@pytest.mark.parametrize("end", ["-", "1.", "```", "~~", "#"])
def test_markup_that_has_just_begun_is_not_shown(body, end):
    body.show_markdown(f"Steps\n{end}", is_complete=False)
    assert body.toPlainText() == "Steps"
    assert body.document().begin().blockFormat().headingLevel() == 0


@pytest.mark.parametrize("start", ["word **bold** ", "- an item\n", "paragraph\n\n", "```py\nx = 1\n"])
def test_appended_text_changes_only_the_end_of_a_long_answer(body, start):
    text = "first paragraph\n\n" + start * 1000
    body.show_markdown(text, is_complete=False)
    num_characters = body.document().characterCount()
    changed_from = []
    body.document().contentsChange.connect(lambda position, removed, added: changed_from.append(position))
    body.show_markdown(text + "more", is_complete=False)
    assert body.toPlainText().endswith("more")
    assert min(changed_from) > num_characters - 5000


def test_selection_survives_appended_text(body):
    body.show_markdown("alpha beta\n\ngamma delta", is_complete=False)
    for word in ("beta", "gamma"):
        body.setTextCursor(body.document().find(word))
        body.show_markdown(f"alpha beta\n\ngamma delta, {word}", is_complete=False)
        assert body.textCursor().selectedText() == word


def test_selection_across_text_and_code_copies_both_without_the_header(body):
    body.show_markdown("before\n\n```py\nx\n```\nafter")
    body.selectAll()
    body.copy()
    assert QGuiApplication.clipboard().text() == "before\nx\nafter"


def test_copy_button_of_a_frame_copies_exactly_its_code(body, qtbot):
    body.show()
    text = f"```python\n{CODE}\n```\n\n- nested:\n  ```sh\n  ls  \n\n  cd\n  ```"
    for is_complete in (False, True):
        body.show_markdown(text, is_complete=is_complete)
        for header, code in zip(headers(body), [CODE, "ls  \n\ncd"], strict=True):
            qtbot.mouseClick(header.copy, Qt.MouseButton.LeftButton)
            assert QGuiApplication.clipboard().text() == code


def test_header_is_above_its_code_at_any_width(body, qtbot):
    body.show()
    body.show_markdown("```py\nx\n```\n\n" + "many words " * 40 + "\n\n```sh\nls\n```")
    for width in (500, 250):
        body.resize(width, body.height())
        for header, code in zip(headers(body), ["x", "ls"], strict=True):
            code_top = body.cursorRect(QTextCursor(find_block(body, code))).top()
            assert 0 <= header.geometry().top() < header.geometry().bottom() < code_top
            assert code_top - header.geometry().bottom() < 20
            assert header.width() <= body.viewport().width()


def find_block(body, text):
    block = body.document().begin()
    while block.text() != text:
        block = block.next()
    return block


def test_code_has_colours_of_the_theme_and_unknown_languages_have_none(body):
    body.show_markdown("```python\nreturn 'a'\n```\n\n```nonsense\nreturn 'a'\n```")
    for theme in (THEMES["light"], THEMES["dark"]):
        body.apply_theme(theme)
        known, unknown = (
            [part.format.foreground().color().name() for part in find.layout().formats()] for find in code_blocks(body)
        )
        assert known == [code_palette(theme)["keyword"], code_palette(theme)["string"]]
        assert unknown == []


def code_blocks(body):
    block = body.document().begin()
    while block.isValid():
        if block.text() == "return 'a'":
            yield block
        block = block.next()


@pytest.mark.parametrize("theme", [*THEMES.values(), *SAFE_THEMES.values()])
def test_colours_of_code_are_readable(theme):
    assert all(contrast_ratio(color, code_background(theme)) >= 4.5 for color in code_palette(theme).values())
