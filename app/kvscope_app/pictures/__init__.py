"""Pictures and videos of views: what is saved is what the views themselves paint."""
