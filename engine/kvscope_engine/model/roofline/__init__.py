"""What a step has to move and to compute at least, and what the device can do at most."""
