"""Spark itself: a JVM, a quick start, a standing server, errors in one line."""
