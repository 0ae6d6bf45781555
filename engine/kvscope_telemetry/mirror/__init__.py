"""Engine state rebuilt from frames: mirrors, and the synchronization that keeps them consistent.

Must not depend on sockets.
"""
