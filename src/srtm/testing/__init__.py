"""Test tools, for users too, in virtual time: a broker and clients in memory (`memory`), and clusters (`virtual`)."""
