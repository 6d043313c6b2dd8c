"""The theory, executable: no clock, no socket, no asyncio, no logging, no Spark; time is always an argument."""
