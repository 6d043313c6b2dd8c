"""NSQ's wire protocols, sans-IO: bytes in and events out, no socket, clock, loop or logging.

`server` and `client` are the two sides of V2 (brokers), `lookup` both sides of V1 (discovery). `frames` is what servers
send, `identify` the negotiation, `orders` SRTM's own addition to it, `names` the rules and limits. docs/protocol.md
says what is NSQ's and what is ours.
"""
