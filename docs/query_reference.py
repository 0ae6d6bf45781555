"""Sphinx directives that generate the list of query tables and of ready questions when the pages are built.

    ```{query-tables}
    ```

writes a section per table with its columns; `{ready-questions}` writes each question with its SQL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from kvscope_telemetry.exports.content import Content
from kvscope_telemetry.exports.kinds import TABLES
from kvscope_telemetry.exports.query.ready_questions import READY_QUESTIONS
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import named_recording

_TYPES = {"int": "BIGINT", "time": "BIGINT", "float": "DOUBLE", "text": "VARCHAR"}


class QueryTables(SphinxDirective):
    def run(self) -> Sequence[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(_tables()), allow_section_headings=True)


class ReadyQuestions(SphinxDirective):
    def run(self) -> Sequence[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(_questions()), allow_section_headings=True)


def _tables() -> Iterator[str]:
    recording = Recording.open(named_recording(Path("sample")))
    content = Content(recording, read_overview(recording), span_of(recording))
    for kind in TABLES:
        yield f"### {kind.name}\n\nOne row per {kind.row}.\n"
        yield "| column | type | unit | meaning |\n|---|---|---|---|"
        for column in kind.table(content).columns:
            yield f"| `{column.name}` | {_TYPES[column.type]} | {column.unit} | {column.description} |"
        yield ""


def _questions() -> Iterator[str]:
    for question in READY_QUESTIONS:
        yield f"### {question.name}\n\n{question.title}\n\n```sql\n{question.sql}\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("query-tables", QueryTables)
    app.add_directive("ready-questions", ReadyQuestions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
