"""Calls of tools: how each family of models writes them, read from an answer as it streams, and forced where asked for.

`formats` is the table of families, one file beside it for each way of writing; `reader` finds calls in an answer;
`forcing` makes the form of an answer that must be calls; `use` is what one request wants of all this.
"""
