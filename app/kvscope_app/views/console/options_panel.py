"""Panel with the options of a conversation: system prompt, LoRA adapter, sampling, answer format and tools.

Values are validated only by `SamplingParams`, so that their limits are the engine's.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.ui.number_fields import parse_number, parse_whole_number
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import label
from kvscope_app.views.console.answer_format import AnswerFormatField
from kvscope_app.views.console.conversation import DEFAULT_SAMPLING, Conversation, sampling_defaults
from kvscope_app.views.console.scored_token import NUM_ALTERNATIVES
from kvscope_app.views.console.tools import read_tools
from kvscope_app.views.console.tools_field import ToolsField
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import LoadedAdapter
from kvscope_telemetry.messages.sampling_params import LEFT_TO_THE_MODEL, ModelSampling, SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingField:
    """Definition of a field: attribute of `SamplingParams`, label, tooltip, and kind of number."""

    name: str
    text: str
    tip: str
    is_whole: bool = False
    can_be_empty: bool = False


FIELDS: Final = (
    SamplingField("max_tokens", "Max tokens", "Maximum tokens to generate; empty: as many as fit", True, True),
    SamplingField(
        "temperature",
        "Temperature",
        "0 always takes the most likely token; higher is more varied. 0 to 100",
        can_be_empty=True,
    ),
    SamplingField(
        "top_p", "Top p", "Smallest set of tokens whose probability reaches it. Above 0, at most 1", can_be_empty=True
    ),
    SamplingField("top_k", "Top k", "Keeps the k most likely tokens; 0 keeps all", True, True),
    SamplingField(
        "min_p", "Min p", "Drops tokens less likely than this share of the most likely one. 0 to 1", can_be_empty=True
    ),
    SamplingField("seed", "Seed", "The same seed gives the same draws; empty: random", True, True),
    SamplingField("presence_penalty", "Presence", "Subtracted from tokens already generated. −2 to 2"),
    SamplingField("frequency_penalty", "Frequency", "Subtracted once per earlier occurrence. −2 to 2"),
    SamplingField(
        "repetition_penalty",
        "Repetition",
        "Divides the score of tokens seen so far. Above 0, at most 10",
        can_be_empty=True,
    ),
)


_ADAPTER_TIP: Final = "The LoRA adapter that answers are computed with"
_LOGPROBS_TIP: Final = "Stores the probability of each token with the answer: hover over the answer to see it"
_NO_LOGPROBS_TIP: Final = "Only kvscope's own engine reports log-probabilities to the console"


class OptionsPanel(QWidget):
    """Fields with the options of one conversation. Valid changes are written into it immediately."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.system = QPlainTextEdit()
        self.system.setPlaceholderText("System prompt")
        self.system.setAccessibleName("System prompt")
        self.system.setTabChangesFocus(True)
        self.system.setFixedHeight(3 * self.system.fontMetrics().lineSpacing() + 18)
        self.fields = {field.name: _line_edit(field) for field in FIELDS}
        self.adapter = QComboBox()
        self.adapter.setAccessibleName("LoRA adapter")
        self.adapter.setToolTip(_ADAPTER_TIP)
        self.adapter.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.adapter.setMinimumContentsLength(8)
        self.stop = QLineEdit()
        self.stop.setPlaceholderText("Stop strings: one | two")
        self.stop.setToolTip("Strings that end the answer, separated by |; \\n is a new line")
        self.stop.setAccessibleName("Stop strings")
        self.format = AnswerFormatField()
        self.tools = ToolsField()
        self.logprobs = QCheckBox("Log-probabilities")
        self._adapter_name = label("LoRA adapter", "muted")
        self._adapter_name.setToolTip(_ADAPTER_TIP)
        self.reset = QPushButton("Reset")
        self.error = label(wraps=True)
        """Label with `problem`. The chat page places it outside the panel, so that it stays visible while the panel is
        folded.
        """
        self.error.hide()
        self._conversation: Conversation | None = None
        self._model: ModelSampling | None = None
        self._adapters: tuple[LoadedAdapter, ...] | None = None
        self.show_model(ModelSampling())
        self.show_logprobs_available(True)
        self.reset.setToolTip("Reset sampling options")
        self._lay_out()
        self._connect()

    @property
    def problem(self) -> str:
        """Reason why the options are invalid, in one line; empty if they are valid."""
        return self.error.text()

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one, so that further answers to a prompt would be the same."""
        sampling = self._conversation.sampling if self._conversation is not None else DEFAULT_SAMPLING
        return (sampling.temperature if sampling.temperature is not None else self._default_temperature) == 0

    def show_conversation(self, conversation: Conversation) -> None:
        self._conversation = None  # filling in the fields is not a change
        if self.system.toPlainText() != conversation.system:
            self.system.setPlainText(conversation.system)
        self._fill(conversation.sampling)
        self.tools.fill(conversation.tools)
        self._conversation = conversation
        self._fill_adapters()
        self._check()

    def show_adapters(self, adapters: tuple[LoadedAdapter, ...] | None) -> None:
        """Set the LoRA adapters that the engine has loaded, or None if they are not reported yet."""
        if adapters != self._adapters:
            self._adapters = adapters
            self._fill_adapters()
            self._check()

    def show_model(self, model: ModelSampling) -> None:
        """Show the default values as placeholders of empty fields: the model's generation config, or else the console's
        defaults.
        """
        if model == self._model:
            return
        self._model = model
        defaults = sampling_defaults(model)
        self._default_temperature = defaults.temperature
        for field in FIELDS:
            if field.name in LEFT_TO_THE_MODEL:
                is_from_model = getattr(model, field.name) is not None
                self.fields[field.name].setPlaceholderText(f"{getattr(defaults, field.name):.10g}")
                source = "from the model's generation config" if is_from_model else "this console's default"
                self.fields[field.name].setToolTip(f"{field.tip}. Empty: {source}")

    def show_logprobs_available(self, is_available: bool) -> None:
        """Set whether the engine reports log-probabilities of tokens."""
        self.logprobs.setEnabled(is_available)
        self.logprobs.setToolTip(_LOGPROBS_TIP if is_available else _NO_LOGPROBS_TIP)

    def apply_theme(self, theme: Theme) -> None:
        self.error.setStyleSheet(f"color: {theme.bad};")

    def read(self) -> SamplingParams:
        """Return the options in the fields. Raises BadInput for the first invalid one."""
        values: dict[str, object] = {field.name: _parse(field, self.fields[field.name].text()) for field in FIELDS}
        values["logprobs"] = NUM_ALTERNATIVES if self.logprobs.isChecked() else None
        values["structured"] = self.format.read()
        return SamplingParams(stop=parse_stops(self.stop.text()), **values)  # type: ignore[arg-type]

    def _fill(self, sampling: SamplingParams) -> None:
        for field in FIELDS:
            value = getattr(sampling, field.name)
            text = "" if value is None else str(value) if field.is_whole else f"{value:.10g}"
            self.fields[field.name].setText(text)
        self.logprobs.setChecked(sampling.logprobs is not None)
        self.format.fill(sampling.structured)
        self.stop.setText("|".join(text.encode("unicode_escape").decode() for text in sampling.stop))

    def _fill_adapters(self) -> None:
        chosen, loaded = self._chosen_adapter, self._adapters or ()
        self.adapter.clear()
        self.adapter.addItem("None", "")
        for each in loaded:
            self.adapter.addItem(each.name, each.name)
            self.adapter.setItemData(self.adapter.count() - 1, plain_tip(each.path), Qt.ItemDataRole.ToolTipRole)
        if chosen and all(each.name != chosen for each in loaded):
            self.adapter.addItem(chosen if self._adapters is None else f"{chosen} (not loaded)", chosen)
        self.adapter.setCurrentIndex(self.adapter.findData(chosen))
        for widget in (self.adapter, self._adapter_name):
            widget.setVisible(self.adapter.count() > 1)

    @property
    def _chosen_adapter(self) -> str:
        return "" if self._conversation is None else self._conversation.adapter

    def _on_adapter(self) -> None:
        if self._conversation is not None:
            self._conversation.adapter = self.adapter.currentData()
            self._check()
            self.changed.emit()

    def _adapter_problem(self) -> str:
        chosen = self._chosen_adapter
        if not chosen or self._adapters is None or any(each.name == chosen for each in self._adapters):
            return ""
        return f"LoRA adapter {chosen!r:.140} is not loaded at this engine: choose another in the options"

    def _on_edited(self) -> None:
        if self._conversation is None:
            return
        self._conversation.system = self.system.toPlainText()
        self._conversation.tools = self.tools.text.toPlainText()
        sampling = self._check()
        if sampling is not None:
            self._conversation.sampling = sampling
        self.changed.emit()

    def _check(self) -> SamplingParams | None:
        sampling, problem = None, ""
        try:
            sampling = self.read()
            read_tools(self.tools.text.toPlainText())
        except BadInput as error:
            problem = str(error)
        problem = problem or self._adapter_problem()
        self.error.setText(problem)
        self.error.setVisible(bool(problem))
        return sampling

    def _on_reset(self) -> None:
        self._fill(DEFAULT_SAMPLING)
        self._on_edited()

    def _connect(self) -> None:
        self.system.textChanged.connect(self._on_edited)
        self.stop.textEdited.connect(self._on_edited)
        self.adapter.activated.connect(self._on_adapter)
        for line in self.fields.values():
            line.textEdited.connect(self._on_edited)
        self.logprobs.clicked.connect(self._on_edited)
        self.format.edited.connect(self._on_edited)
        self.tools.edited.connect(self._on_edited)
        self.reset.clicked.connect(self._on_reset)

    def _lay_out(self) -> None:
        grid = QGridLayout()
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(5)
        for index, field in enumerate(FIELDS):
            name = label(field.text, "muted")
            name.setToolTip(field.tip)
            row, column = divmod(index, 2)
            grid.addWidget(name, row, 2 * column)
            grid.addWidget(self.fields[field.name], row, 2 * column + 1)
        adapter_row = QHBoxLayout()
        adapter_row.addWidget(self._adapter_name)
        adapter_row.addWidget(self.adapter, 1)
        stop_row = QHBoxLayout()
        stop_row.addWidget(self.stop, 1)
        stop_row.addWidget(self.reset)
        format_row = QHBoxLayout()
        format_row.addWidget(label("Answer format", "muted"), 0, Qt.AlignmentFlag.AlignTop)
        format_row.addWidget(self.format, 1)
        tools_row = QHBoxLayout()
        tools_row.addWidget(label("Tools", "muted"), 0, Qt.AlignmentFlag.AlignTop)
        tools_row.addWidget(self.tools, 1)
        self.column = column_layout = QVBoxLayout(self)
        column_layout.setContentsMargins(10, 6, 10, 8)
        column_layout.setSpacing(6)
        column_layout.addWidget(self.system)
        column_layout.addLayout(adapter_row)
        column_layout.addLayout(grid)
        column_layout.addLayout(stop_row)
        column_layout.addLayout(format_row)
        column_layout.addLayout(tools_row)
        column_layout.addWidget(self.logprobs)


def parse_stops(text: str) -> tuple[str, ...]:
    r"""Split stop strings at bars; `\n`, `\t` and `\\` are escapes. Raises BadInput for an incomplete escape."""
    return tuple(_unescape(text_part) for text_part in text.split("|") if text_part)


def _unescape(text: str) -> str:
    try:
        return codecs.decode(text.encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError as error:
        raise BadInput(f"stop string {text!r:.40} is not accepted: it ends inside an escape") from error


def _parse(field: SamplingField, text: str) -> object:
    """Return the number in `text`, or None if `text` is empty and the field may be empty. Return an invalid `text`
    itself.

    `SamplingParams` then reports the invalid option and its limits.
    """
    text = text.strip()
    if not text and field.can_be_empty:
        return None
    value = parse_whole_number(text) if field.is_whole else parse_number(text)
    return text if value is None else value


def _line_edit(field: SamplingField) -> QLineEdit:
    line = QLineEdit()
    line.setAccessibleName(field.text)
    line.setToolTip(field.tip)
    line.setMinimumWidth(line.fontMetrics().horizontalAdvance("00000") + 20)
    if field.can_be_empty:
        line.setPlaceholderText("random" if field.name == "seed" else "no limit")
    return line
