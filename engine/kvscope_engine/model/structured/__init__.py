"""Text in the form that was asked for: JSON, a regex, a grammar, a choice, by XGrammar."""
