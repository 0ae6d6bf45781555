"""Alarms: rules that are evaluated on the per-second summaries of a session, identically live and for recordings.

Must not depend on Qt or files.
"""
