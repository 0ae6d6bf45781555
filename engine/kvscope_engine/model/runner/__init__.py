"""Running a step on the device, and what is decided before the first one: KV groups, pool size, backends."""
