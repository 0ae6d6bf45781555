"""Options of the commands, and their conversion to settings. Runs no command."""
