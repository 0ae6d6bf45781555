"""The commands of `kvscope` that open no window: they inspect, make, export and repair recordings. No Qt."""
