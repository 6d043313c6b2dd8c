"""Disk topics: the log, its files, and what stands between them and the loop."""
