"""Commands of `kvscope`, most of which open no window: they inspect, record, export, repair and replay recordings.

No module here imports Qt at module level.
"""
