"""Test tools, for users too: a broker and clients in memory (`memory`), and whole clusters (`virtual`), in virtual time."""
