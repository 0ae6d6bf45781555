"""Watches many engines at once, a few figures of each: the list of their addresses, and a light reader of them all. No
Qt.
"""
