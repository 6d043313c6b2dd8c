"""`srtm generate`: configuration for monitoring: Prometheus alert rules and scraping, a Grafana dashboard."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from srtm.cli.help import App
from srtm.cli.remote import HERE, Controller

app = App("Generate configuration for Prometheus and Grafana.")

Out = Annotated[Path | None, typer.Option(metavar="FILE", help="File to write", show_default="stdout")]
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT = 8, 8
# Title, unit, legend, expression; three to a row.
_PANELS: list[tuple[str, str, str, str]] = [
    ("Brokers alive", "short", "alive", "sum(srtm_cluster_broker_up)"),
    ("SLOs not met", "short", "not met", "count(srtm_cluster_topic_slo_met == 0) or vector(0)"),
    ("Messages", "mps", "{{broker}}", "srtm_cluster_broker_messages_per_second"),
    (
        "p99 relative to SLO",
        "percentunit",
        "{{topic}}",
        (
            'srtm_cluster_topic_latency_seconds{part="total",quantile="0.99"}'
            " / ignoring(part, quantile) srtm_cluster_topic_slo_seconds"
        ),
    ),
    ("DRL penalty", "s", "{{topic}}", "srtm_cluster_topic_penalty_seconds"),
    (
        "Access delay, p99",
        "s",
        "{{topic}}",
        'srtm_cluster_topic_latency_seconds{part="access",quantile="0.99",topic=~"$topic"}',
    ),
    (
        "Processing latency, p99",
        "s",
        "{{topic}}",
        'srtm_cluster_topic_latency_seconds{part="processing",quantile="0.99",topic=~"$topic"}',
    ),
    (
        "End-to-end latency, p99",
        "s",
        "{{topic}}",
        'srtm_cluster_topic_latency_seconds{part="total",quantile="0.99",topic=~"$topic"}',
    ),
    ("Waiting messages", "short", "{{topic}}", 'srtm_cluster_topic_waiting_messages{topic=~"$topic"}'),
    ("k", "short", "{{topic}}", 'srtm_cluster_topic_brokers{topic=~"$topic"}'),
    (
        "Shares of r",
        "percentunit",
        "{{topic}} at {{broker}}",
        (
            'srtm_cluster_topic_share_tokens_per_second{topic=~"$topic"}'
            " / on(topic) group_left srtm_cluster_topic_contract_tokens_per_second"
        ),
    ),
    (
        "Shares of b",
        "percentunit",
        "{{topic}} at {{broker}}",
        (
            'srtm_cluster_topic_share_burst_tokens{topic=~"$topic"}'
            " / on(topic) group_left srtm_cluster_topic_contract_burst_tokens"
        ),
    ),
    (
        "Broker load",
        "percentunit",
        "{{broker}}",
        "srtm_cluster_broker_messages_per_second / srtm_cluster_broker_capacity_messages_per_second",
    ),
    ("Loop lag", "s", "{{broker}}", "srtm_cluster_broker_loop_lag_seconds"),
    ("Memory", "bytes", "{{broker}}", 'process_resident_memory_bytes{broker!=""}'),
    (
        "Channel depth",
        "short",
        "{{topic}}/{{channel}}",
        'sum by (topic, channel) (srtm_channel_depth{topic=~"$topic"})',
    ),
    (
        "Timeouts and requeues",
        "ops",
        "{{topic}}/{{channel}}",
        "sum by (topic, channel) (rate(srtm_channel_timed_out_total[1m]) + rate(srtm_channel_requeued_total[1m]))",
    ),
    ("Bytes received", "Bps", "{{topic}}", 'sum by (topic) (rate(srtm_topic_bytes_total{topic=~"$topic"}[1m]))'),
]


@app.command()
def prometheus(
    scrape: Annotated[
        bool, typer.Option("--scrape", help="Write a scrape configuration instead of alert rules")
    ] = False,
    controller: Controller = HERE,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token file that Prometheus reads, of a viewer; for --scrape")
    ] = None,
    out: Out = None,
) -> None:
    """Write alert rules or a scrape configuration for Prometheus.

    The scrape configuration discovers brokers through the controller.

    Examples:
        srtm generate prometheus --out srtm-alerts.yml
        srtm generate prometheus --scrape --out prometheus.yml
    """
    if scrape:
        _write(_scraped(controller, token_file), out)
    else:
        _write(resources.files("srtm.cli").joinpath("data/alerts.yml").read_text(), out)


@app.command()
def grafana(out: Out = None) -> None:
    """Write a Grafana dashboard; on import, Grafana asks for its Prometheus data source.

    Example:
        srtm generate grafana --out srtm-dashboard.json
    """
    _write(json.dumps(dashboard(), indent=1) + "\n", out)


def _scraped(controller: str, token_file: Path | None) -> str:
    url = controller if "://" in controller else f"http://{controller}"
    scheme, _, target = url.rstrip("/").partition("://")
    shown = f"authorization: {{credentials_file: {json.dumps(str(token_file))}}}" if token_file else ""
    for_job, for_brokers = (f"    {shown}\n", f"        {shown}\n") if shown else ("", "")
    return f"""\
global:
  scrape_interval: 5s
  evaluation_interval: 5s
rule_files:
  - srtm-alerts.yml
scrape_configs:
  - job_name: srtm-controller
    scheme: {scheme}
{for_job}    static_configs:
      - targets: [{json.dumps(target)}]
  - job_name: srtm-brokers
    http_sd_configs:
      - url: {json.dumps(f"{url.rstrip('/')}/v1/targets")}
        refresh_interval: 15s
{for_brokers}"""


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model."""
    return {
        "title": "SRTM",
        "uid": "srtm",
        "tags": ["srtm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "topic",
                    "label": "Topic",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": "label_values(srtm_cluster_topic_slo_seconds, topic)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [_panel(number, *each) for number, each in enumerate(_PANELS)],
    }


def _panel(number: int, title: str, unit: str, legend: str, expression: str) -> dict[str, Any]:
    row, column = divmod(number, 24 // _WIDTH)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [{"refId": "A", "datasource": _SOURCE, "expr": expression, "legendFormat": legend}],
    }


def _write(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)
        print(out)
