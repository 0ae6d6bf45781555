"""What is read from a command line or a file of prompts, and becomes settings. No command is run here."""
