"""What blocks hold as text, for recordings: what is asked for, what is written, how it is found. Knows no file."""
