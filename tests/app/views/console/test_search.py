"""Tests of the search over conversations."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt

from kvscope_app.views.console.conversation import Conversation, Message
from kvscope_app.views.console.conversation_store import ConversationStore
from kvscope_app.views.console.search_index import SearchIndex


def conversation(key, title, *texts, changed_s=1.0):
    messages = [Message(role=("user", "assistant")[i % 2], content=text, ending="stop") for i, text in enumerate(texts)]
    return Conversation(key=key, title=title, messages=messages, changed_s=changed_s)


@pytest.fixture
def store(tmp_path):
    store = ConversationStore(tmp_path / "conversations")
    store.add_all(
        [
            conversation("a", "Geography", "Capital of FRANCE?", "It is Paris.", changed_s=1.0),
            conversation("b", "Größe", "Wie groß?", "Sehr groß, wie in Paris.", changed_s=2.0),
        ]
    )
    yield store
    store.close()


@pytest.fixture
def search(store):
    index = SearchIndex(store.folder)
    return lambda query: [hit.key for hit in index.search(query)]


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ("paris", ["b", "a"]),
        ("france paris", ["a"]),
        ("geo FRANCE", ["a"]),
        ("GRÖSSE", ["b"]),
        ("gro\u0308ße", ["b"]),
        ("france berlin", []),
        ("  ", []),
        ("100%_", []),
    ],
)
def test_conversations_with_all_words_in_title_or_messages_are_found_newest_first(search, query, keys):
    assert search(query) == keys


def test_hit_has_the_text_around_the_word_and_the_message(store):
    (hit,) = SearchIndex(store.folder).search("it is paris")
    assert (hit.title, hit.excerpt, hit.message) == ("Geography", "It is Paris.", "1")


def test_later_changes_and_deletions_are_found(store, search):
    assert search("tokyo") == []
    store.add_all([conversation("c", "New", "Tokyo")])
    store.delete("a")
    assert search("tokyo") == ["c"]
    assert search("france") == []


@pytest.fixture
def two_chats(console):
    console.ask("About whales", "They sing.")
    console.card.redo.click()
    console.token("They dive.")
    console.finish()
    console.page.new_conversation()
    console.ask("About birds", "They fly.")
    return console


@pytest.mark.parametrize("width", [420, 900])
def test_enter_opens_the_first_hit_with_the_version_that_has_the_words(two_chats, qtbot, width):
    page = two_chats.page
    two_chats.view.resize(width, 560)
    two_chats.view.run_command("search")
    qtbot.waitUntil(page.search.field.hasFocus)
    qtbot.keyClicks(page.search.field, "SING")
    with qtbot.waitSignal(page.search.opened, timeout=20_000):
        qtbot.keyClick(page.search.field, Qt.Key.Key_Return)
    assert two_chats.texts == ["About whales", "They sing."]
    assert page.transcript.isVisible()


def test_hits_replace_the_list_until_esc(two_chats, qtbot):
    page = two_chats.page
    two_chats.view.resize(900, 560)
    page.search.start()
    qtbot.waitUntil(page.search.field.hasFocus)
    qtbot.keyClicks(page.search.field, "about")
    qtbot.waitUntil(lambda: page.search.results.count() == 2)
    assert not page.list.isVisible()
    qtbot.keyClick(page.search.field, Qt.Key.Key_Escape)
    assert page.list.isVisible()
    assert page.search.field.text() == ""


def test_search_replaces_the_conversation_in_a_narrow_console_until_esc(two_chats, qtbot):
    page = two_chats.page
    page.head.search.click()
    qtbot.waitUntil(page.search.field.hasFocus)
    assert not page.transcript.isVisible()
    qtbot.keyClick(page.search.field, Qt.Key.Key_Escape)
    assert page.transcript.isVisible()
    assert not page.search.isVisible()


def test_conversation_that_is_not_loaded_is_opened_and_scrolled_to(console, qtbot):
    texts = [f"message {i}" for i in range(120)]
    texts[3] = "needle"
    console.chat.add_stored([conversation("old", "Old", *texts)])
    console.chat.conversations[:] = [each for each in console.chat.conversations if each.key != "old"]
    console.page.search.opened.emit("old", "3")
    card = next(each for each in console.page.transcript.cards if each.message.key == "3")
    viewport = console.page.transcript.viewport()
    qtbot.waitUntil(lambda: 0 <= card.mapTo(viewport, card.rect().topLeft()).y() < viewport.height())
