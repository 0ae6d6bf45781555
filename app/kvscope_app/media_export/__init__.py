"""Pictures and videos of views, painted by the views themselves."""
