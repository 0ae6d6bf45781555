"""Alarms: rules evaluated on the per-second summaries of a session, identically live and for recordings. Imports no Qt
and reads no files.
"""
