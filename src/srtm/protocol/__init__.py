"""NSQ's wire protocols, sans-IO: bytes in and events out, no socket, clock, loop or logging.

`server` and `client` are the two sides of V2 (brokers), `lookup` both sides of V1 (discovery). `frames` has the frames
that servers send, `identify` the negotiation, `orders` SRTM's extension of it, `names` rules and limits.
docs/protocol.md distinguishes NSQ's part from SRTM's.
"""
