"""The broker's HTTP: nsqd's endpoints and SRTM's own.

`api` has the table of endpoints. `publishing`, `administration`, `logs` and `control` carry them out; `request` reads
what a request names. `stats` and `metrics` render a broker's statistics.
"""
