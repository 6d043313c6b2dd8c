"""Who publishes and when: synthetic publishers, and the trace files that hold arrivals."""
