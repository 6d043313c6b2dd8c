"""What broker and client share of a connection: TLS, compression, kernel stamps, timers, back-off, credentials."""
