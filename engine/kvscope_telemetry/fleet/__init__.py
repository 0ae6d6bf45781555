"""Many engines at once, a little of each: the list of their addresses, and a light reader of them all. No Qt."""
