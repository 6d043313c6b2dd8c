"""Verbs that read or write traces, most of them on Spark."""
