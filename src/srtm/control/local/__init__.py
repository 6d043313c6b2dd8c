"""A cluster of processes on this machine: `srtm up`."""
