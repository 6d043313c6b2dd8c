"""The data plane: one process, one loop, one core. Speaks NSQ, holds topics to their sub-token buckets."""
