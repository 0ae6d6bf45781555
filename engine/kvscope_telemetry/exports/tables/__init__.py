"""Tables of a recording, and the formats they are written in."""
