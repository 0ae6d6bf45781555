"""Tests of the rendering of answer text: line breaks, formulas, images and reasoning."""

from __future__ import annotations

import pytest

from kvscope_app.views.console.text_body import TextBody, split_reasoning


@pytest.fixture
def body(qtbot):
    body = TextBody("Answer")
    qtbot.addWidget(body)
    return body


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("An old silent pond\nA frog jumps in\nSplash", "An old silent pond\nA frog jumps in\nSplash"),
        ("one\n\ntwo", "one\ntwo"),
        (r"so \(a^2 + b_1*c*d\) and \[x_{1} \\ y\]", r"so \(a^2 + b_1*c*d\) and \[x_{1} \\ y\]"),
        ("$$\nx_1 * y * z\n$$\nend", "$$\nx_1 * y * z\n$$\nend"),
        ("costs $5 and *now* $6", "costs $5 and now $6"),
        ("![a *cat*](http://x/y.png 'title') here", "Image: a cat here"),
        ("![](http://x/y.png)", "Image: no description"),
        ("```py\na  \n\n  b\\(2\\)\n```\nafter", "a  \n\n  b\\(2\\)\nafter"),
        (r"`\(x\)` and `![a](b)`", r"\(x\) and ![a](b)"),
        ("- a\n- b\n\n1. c", "a\nb\nc"),
        ("see http://x.org/y\nnext", "see http://x.org/y\nnext"),
        ("a | b\n--- | ---\n1 | 2", "\na\nb\n1\n2\n"),
        ("| a | b |\n|---|:--|\n| 1 | 2 |\n\nend", "\na\nb\n1\n2\n\nend"),
        ("Title\n---\n# Next\ntext", "Title\nNext\ntext"),
        ("*one*\n**two**\n> quote\n> more", "one\ntwo\nquote\nmore"),
    ],
)
def test_markdown_keeps_line_breaks_formulas_and_alternative_texts(body, text, shown):
    body.show_markdown(text)
    assert body.toPlainText() == shown


def test_line_breaks_have_less_spacing_than_paragraphs(body):
    body.show_markdown("one\ntwo\n\nthree")
    one, two, three = (body.document().findBlockByNumber(number).blockFormat() for number in range(3))
    assert one.bottomMargin() + two.topMargin() < two.bottomMargin() + three.topMargin()


def test_line_break_after_a_link_is_not_part_of_its_address(body):
    body.show_markdown("http://x.org/y\nnext")
    assert 'href="http://x.org/y"' in body.document().toHtml()


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nhm\n</think>\n\nhi", "hm", "hi"),
        ("<think>hm", "hm", ""),
        ("hm\n</think>\n\nhi", "hm", "hi"),
        ("<think></think>\nhi", "", "hi"),
        ("use `</think>` to end", "", "use `</think>` to end"),
        ("plain", "", "plain"),
    ],
)
def test_reasoning_is_separated_from_the_answer(text, reasoning, answer):
    assert split_reasoning(text) == (reasoning, answer)


def test_plain_answer_text_can_be_extended_or_replaced_and_shows_markup_literally(body):
    for text in ("**a", "**a b**", "other"):
        body.show_plain(text)
        assert body.toPlainText() == text


@pytest.mark.parametrize("text", ["<", "<thin", "\n<think", "<think", "<think>"])
def test_unfinished_reasoning_tag_is_not_shown_as_text(text):
    assert split_reasoning(text, is_complete=False) == ("", "")


def test_unfinished_end_tag_is_not_shown_as_reasoning():
    assert split_reasoning("<think>a < b</thi", is_complete=False) == ("a < b", "")
    assert split_reasoning("a </thi", is_complete=True) == ("", "a </thi")
