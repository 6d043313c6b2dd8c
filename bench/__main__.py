"""`python -m bench [NAME …]`: all measurements, or those named."""

from __future__ import annotations

import argparse

from bench import discovery, fitting, host, model, path, protocol

SEED = 1
ALL = {
    "arrays": model.arrays,
    "scalar": model.scalar,
    "placement": model.placement,
    "simulator": model.simulator,
    "theory": model.theory,
    "synthesis": model.synthesis,
    "fitting": fitting.table_1,
    "growth": fitting.many_brokers,
    "tokens": fitting.whole_tokens,
    "protocol": protocol.parsing,
    "path": path.stages,
    "discovery": discovery.registrations,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(ALL)} (default: all)")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in ALL]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}: choose from {', '.join(ALL)}")
    print(host.describe(options.seed))
    for name in options.names or ALL:
        ALL[name](options.seed)


if __name__ == "__main__":
    main()
