"""The data plane of one broker."""
