"""Structured output: text in a requested form (JSON, a regex, a grammar, a choice), by XGrammar."""
