"""The format `srtm` of Structured Streaming: source and sink."""
