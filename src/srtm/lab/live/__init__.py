"""Results on real brokers and real sockets, scaled to this machine (docs/evaluation.md, "Live")."""
