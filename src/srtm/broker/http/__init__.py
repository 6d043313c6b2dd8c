"""The broker's HTTP: nsqd's API and ours, statistics, metrics."""
