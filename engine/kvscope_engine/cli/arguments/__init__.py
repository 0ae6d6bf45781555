"""Turns command lines and prompt files into settings. Runs no command."""
