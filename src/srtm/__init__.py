"""SRTM: publishers placed so that a topic's token bucket is split only where it must be."""

__version__ = "0.1.0"
