"""`python -m srtm` is `srtm`."""

from srtm.cli import main

main()
