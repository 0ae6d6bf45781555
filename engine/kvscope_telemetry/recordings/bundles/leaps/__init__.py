"""How leaps lie in a recording, and how many of them are read as one."""
