"""An Airflow DAG that checks each hour of recorded traffic and adds it to a store of profiles.

Put this file into Airflow's folder of DAGs, and SRTM (`pip install 'srtm[spark]'`) where its tasks run. Recordings are
in a folder per hour, from all brokers. Set the Airflow variables `srtm_recordings`, `srtm_store` and `srtm_contract`,
or edit the paths below. `srtm` takes paths and URIs (`s3://…`); give it `--master spark://…` to run on a cluster.

Hours that Airflow repeats or back-fills are safe: the store holds each message once, in whatever order hours come.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

HOUR = "{{ var.value.get('srtm_recordings', '/data/recordings') }}/{{ data_interval_start.strftime('%Y-%m-%dT%H') }}"
STORE = "{{ var.value.get('srtm_store', '/data/profiles') }}"
CONTRACT = "{{ var.value.get('srtm_contract', '/data/contract.json') }}"

with DAG(
    "srtm_hourly_profile",
    schedule=timedelta(hours=1),
    start_date=datetime(2026, 11, 1, tzinfo=UTC),
    catchup=True,
    max_active_runs=1,  # one program at a time may write to a store
    default_args={"retries": 2, "retry_delay": timedelta(minutes=5)},
) as dag:
    check = BashOperator(  # exits with 1, and so fails, if the hour did not keep to the contract
        task_id="check_contract",
        bash_command=f"srtm conformance '{HOUR}' --contract '{CONTRACT}'",
        retries=0,
    )
    add = BashOperator(
        task_id="add_to_store",
        bash_command=f"srtm profile '{HOUR}' --store '{STORE}'",
    )
    week = BashOperator(  # r and b of the last seven days; the JSON document on its last line goes to XCom
        task_id="profile_of_the_week",
        bash_command=(
            f"srtm profile --store '{STORE}' --every 24h --json"
            " --from {{ (data_interval_end - macros.timedelta(days=7)).strftime('%Y-%m-%dT%H') }}"
            " --to {{ data_interval_end.strftime('%Y-%m-%dT%H') }}"
        ),
    )
    add >> week
