"""Allocation policies: where a request's next block comes from. `paged` is the default, and is compared with the
others.
"""
