"""Traffic: synthetic publishers, and the files that hold traces, contracts and groups."""
