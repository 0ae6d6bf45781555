"""Tables of a recording, and their file formats."""
