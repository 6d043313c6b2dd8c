"""Defaults for the contract of a topic. Profiles, plans, loads and the controller all start from these."""

from __future__ import annotations

HEADROOM = "1.1"  # r over the mean rate; the paper's 10 %
# Fraction of the messages that find a token at once. A p99 SLO lets 1 % of the messages be late: at 0.995, waiting for
# tokens uses half of that and leaves the other half to processing. The paper's rule, 0.99, leaves processing nothing
# (docs/adr/0005-paper-testbed.md).
QUANTILE = "0.995"
POLICY = "srtm"
ADAPT_WINDOW_S = 10  # seconds of traffic that the TB Adaptor follows; the paper's history window
ADAPT_PERIOD_S = 1  # seconds between two adaptations
LENDING = "off"  # whether the brokers of a topic lend each other tokens, and when: a `lending.Term`
