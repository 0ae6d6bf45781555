"""Where the device's bytes went, and how well the pool's blocks are used."""
