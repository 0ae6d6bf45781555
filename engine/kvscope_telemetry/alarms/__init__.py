"""Alarms: rules on the summaries of a session, the same live and for a recording. Knows no files and no Qt."""
