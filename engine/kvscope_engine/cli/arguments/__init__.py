"""Converts command lines and prompt files to settings. Runs no command."""
