"""What broker and client share: sockets, buffered writing, TLS, compression, kernel stamps, timers, back-off."""
