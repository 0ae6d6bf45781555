"""Commands of `kvscope` that open no window: they inspect, record, export, repair and replay recordings.

Nothing here imports Qt at module level.
"""
