"""The data plane: one process, one loop, one core. Speaks NSQ, and holds topics to their sub-token buckets."""
