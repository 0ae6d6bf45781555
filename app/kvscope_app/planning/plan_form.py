"""Form with the options of a memory plan, as passed to `kvscope-engine plan`."""

from __future__ import annotations

from typing import Final, TypeVar

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QCheckBox, QComboBox, QGridLayout, QLineEdit, QVBoxLayout, QWidget

from kvscope_app.planning.plan_process import Question
from kvscope_app.ui.number_fields import WholeNumberBox, with_decimal_point
from kvscope_app.ui.number_text import count
from kvscope_app.ui.widget_factories import label
from kvscope_telemetry.messages.memory_plan import KV_CACHE_DTYPES, WEIGHT_BYTES

GPU_SIZES: Final = ("8GiB", "12GiB", "16GiB", "24GiB", "32GiB", "48GiB", "80GiB", "96GiB", "141GiB", "192GiB")
_PARALLEL: Final = ("1", "2", "4", "8")
_MAX_VALUE: Final = 1 << 22
Field = TypeVar("Field", bound=QWidget)


class PlanForm(QWidget):
    changed = Signal()

    def __init__(self, model: str = "default") -> None:
        super().__init__()
        self._grid = QGridLayout()
        self._grid.setColumnStretch(1, 1)
        self._grid.setHorizontalSpacing(14)
        self._grid.setVerticalSpacing(7)
        self.model = self._add_line("Model", model, "A model's name, a folder, a .gguf file or a config.json (--model)")
        self.gpu = self._add_choice("GPU memory", GPU_SIZES, "24GiB", "--gpu-memory", editable=True)
        self.dtype = self._add_choice("Weights", tuple(WEIGHT_BYTES), "bfloat16", "--dtype")
        self.kv_dtype = self._add_choice("KV cache", KV_CACHE_DTYPES, "auto", "--kv-cache-dtype")
        self.length = self._add_number(
            "Max request length", 0, _MAX_VALUE, "--max-model-len, in tokens", "model's maximum"
        )
        self.seqs = self._add_number("Requests per step", 1, 1 << 16, "--max-num-seqs")
        self.seqs.setValue(64)
        self.tokens = self._add_number("Tokens per step", 1, 1 << 20, "--max-num-batched-tokens")
        self.tokens.setValue(8192)
        self.tensor = self._add_choice("Tensor-parallel GPUs", _PARALLEL, "1", "--tensor-parallel-size")
        self.pipeline = self._add_choice("Pipeline-parallel GPUs", _PARALLEL, "1", "--pipeline-parallel-size")
        self.train = QCheckBox("Include training")
        self.train.toggled.connect(self._show_training)
        self.train.toggled.connect(self.changed)
        self._grid.addWidget(self.train, self._grid.rowCount(), 0, 1, 2)
        first_training_row = self._grid.rowCount()
        self.batch = self._add_number("Batch size", 1, 1 << 16, "--batch-size, on one GPU")
        self.train_length = self._add_number("Tokens per sequence", 0, _MAX_VALUE, "--length", f"{count(2048)} at most")
        self.precision = self._add_choice(
            "Precision",
            ("mixed", "autocast", "bfloat16", "float32"),
            "mixed",
            "--precision: with mixed, the optimizer keeps float32 copies of the weights",
        )
        self.optimizer = self._add_choice("Optimizer", ("adamw", "sgd"), "adamw", "--optimizer")
        self.zero = self._add_choice("ZeRO stage", ("0", "1", "2", "3"), "0", "--zero")
        self.ranks = self._add_number("Data-parallel GPUs", 1, 1 << 16, "--data-parallel-size")
        self.checkpointing = QCheckBox("Gradient checkpointing")
        self.checkpointing.toggled.connect(self.changed)
        self._grid.addWidget(self.checkpointing, self._grid.rowCount(), 0, 1, 2)
        self._training_widgets = self._widgets_from(first_training_row)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addLayout(self._grid)
        column.addStretch()
        self._show_training(False)

    @property
    def question(self) -> Question:
        options = [
            ("--model", self.model.text().strip() or "default"),
            ("--gpu-memory", with_decimal_point(self.gpu.currentText().strip())),
            ("--dtype", self.dtype.currentText()),
            ("--kv-cache-dtype", self.kv_dtype.currentText()),
            ("--max-num-seqs", str(self.seqs.value())),
            ("--max-num-batched-tokens", str(self.tokens.value())),
            ("--tensor-parallel-size", self.tensor.currentText()),
            ("--pipeline-parallel-size", self.pipeline.currentText()),
        ]
        if self.length.value():
            options.append(("--max-model-len", str(self.length.value())))
        flat = [f"{name}={value}" for name, value in options]
        return (*flat, *self._training_options()) if self.train.isChecked() else tuple(flat)

    def _training_options(self) -> tuple[str, ...]:
        options = [
            "--train",
            f"--batch-size={self.batch.value()}",
            f"--precision={self.precision.currentText()}",
            f"--optimizer={self.optimizer.currentText()}",
            f"--zero={self.zero.currentText()}",
            f"--data-parallel-size={self.ranks.value()}",
        ]
        if self.train_length.value():
            options.append(f"--length={self.train_length.value()}")
        if self.checkpointing.isChecked():
            options.append("--gradient-checkpointing")
        return tuple(options)

    def _show_training(self, is_shown: bool) -> None:
        for widget in self._training_widgets:
            widget.setVisible(is_shown)

    def _widgets_from(self, row: int) -> list[QWidget]:
        widgets = []
        for index in range(self._grid.count()):
            position = self._grid.getItemPosition(index)
            item = self._grid.itemAt(index)
            widget = None if item is None else item.widget()
            if widget is not None and isinstance(position, tuple) and position[0] >= row:
                widgets.append(widget)
        return widgets

    def _add_line(self, name: str, text: str, tip: str) -> QLineEdit:
        field = QLineEdit(text)
        field.setCursorPosition(0)
        field.textEdited.connect(self.changed)
        return self._add_row(name, field, tip)

    def _add_choice(
        self, name: str, choices: tuple[str, ...], current: str, tip: str, *, editable: bool = False
    ) -> QComboBox:
        field = QComboBox()
        field.addItems(choices)
        field.setEditable(editable)
        field.setCurrentText(current)
        field.currentTextChanged.connect(self.changed)
        return self._add_row(name, field, tip)

    def _add_number(self, name: str, minimum: int, maximum: int, tip: str, zero_text: str = "") -> WholeNumberBox:
        field = WholeNumberBox()
        field.setRange(minimum, maximum)
        field.setSpecialValueText(zero_text)
        field.valueChanged.connect(self.changed)
        return self._add_row(name, field, tip)

    def _add_row(self, name: str, field: Field, tip: str) -> Field:
        row = self._grid.rowCount()
        name_label = label(name)
        name_label.setToolTip(tip)
        field.setToolTip(tip)
        field.setAccessibleName(name)
        self._grid.addWidget(name_label, row, 0)
        self._grid.addWidget(field, row, 1)
        return field
