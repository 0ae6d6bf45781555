"""Structured output: text in a requested format (JSON, a regex, a grammar, a choice), enforced by XGrammar."""
