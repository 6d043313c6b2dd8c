"""Delivery by another system: nsqd or NATS JetStream."""
