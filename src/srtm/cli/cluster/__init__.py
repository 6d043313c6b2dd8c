"""Verbs of operators: run a cluster, and look after its topics."""
