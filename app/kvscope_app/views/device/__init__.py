"""Every GPU and the machine itself: who takes their memory, how busy, warm and slowed down they are, and since when."""
