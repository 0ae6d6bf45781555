"""Decoding behind long contexts: contenders are filled once, and then measured by turns."""
