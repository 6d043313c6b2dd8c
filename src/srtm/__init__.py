"""SRTM: publishers placed so that a topic's token bucket is split only where it must be."""

from srtm import native

__version__ = "0.1.0"

native.install()
