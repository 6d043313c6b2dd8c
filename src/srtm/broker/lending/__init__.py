"""Lending between brokers: tokens of a topic that others need more, and the connections that they travel by."""
