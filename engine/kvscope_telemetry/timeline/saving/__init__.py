"""How a part of what was recorded becomes a file of its own where its chunks can be taken as they lie."""
