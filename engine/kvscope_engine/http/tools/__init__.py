"""Tool calls: how each family of models writes them, how they are read from an answer, and how they are forced.

`formats` is the table of formats, made of the bodies in `bodies`; `reader` finds calls in an answer while it streams;
`forcing` makes the structural tag of an answer that must be calls; `use` combines them for one request.
"""
