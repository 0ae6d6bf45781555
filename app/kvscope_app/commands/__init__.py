"""What `kvscope` does without a window: look into recordings, make them, take them out. No Qt."""
