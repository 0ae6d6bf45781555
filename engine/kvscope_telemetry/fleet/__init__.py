"""Watches many engines at once with a few figures each: the list of their addresses, and a lightweight reader for each.
Must not depend on Qt.
"""
