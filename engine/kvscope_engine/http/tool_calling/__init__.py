"""Tool calls: how each family of models writes them, how they are parsed from an answer, and how they are forced.

`formats` is the table of formats, composed of the parsers in `bodies`; `reader` finds calls in a streaming answer;
`forcing` builds the structural tag of an answer that must be calls; `use` combines them for one request.
"""
