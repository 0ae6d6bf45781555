"""Fixtures of the model tests that these tests use as well."""

from __future__ import annotations

from tests.engine.model.conftest import default_file, default_folder, default_tokenizer, tiny_tokenizer  # noqa: F401
