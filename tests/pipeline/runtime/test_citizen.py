"""Sessions, clusters and configurations that are not SRTM's: they stay as they are, and jobs run on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from srtm.errors import InputError
from srtm.pipeline.groups import groups
from srtm.pipeline.plan import plan
from srtm.pipeline.profile import profile
from srtm.pipeline.runtime.configured import configured
from srtm.pipeline.session import spark_session
from srtm.workload.publishers import Population, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, ArrivalWriter, writing
from tests.conftest import ROOT
from tests.pipeline.jobs import BROKERS
from tests.pipeline.runtime.namespace import namespace
from tests.pipeline.runtime.standalone import HOME, OPTIONS, Cluster, environment, standalone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from srtm.pipeline.runtime.server import Server

JOBS = """
from srtm.pipeline.groups import groups
from srtm.pipeline.plan import plan
from srtm.pipeline.profile import profile
from srtm.pipeline.session import spark_session
from tests.pipeline.jobs import BROKERS

def said(path, spark):
    rows = spark.read.parquet(path)
    found = [profile(path, spark), profile(rows), groups(path, spark), groups(rows), plan(path, spark, BROKERS)]
    return [repr(each) for each in found]
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    workload = Workload((Population(40, 100.0, 10, "poisson", 20),), 5 * 10**9, seed=4)
    with writing(path, ARRIVAL_SCHEMA, {}) as file:
        rows = ArrivalWriter(file, "t", workload.publishers())
        rows.write(workload.arrivals())
        rows.flush()
    return path


@pytest.fixture(scope="module")
def here(spark: SparkSession, trace: Path) -> list[str]:
    """What the jobs of `JOBS` say in a session of SRTM's."""
    rows = spark.read.parquet(str(trace))
    found = [profile(trace, spark), profile(rows), groups(trace, spark), groups(rows), plan(trace, spark, BROKERS)]
    return [repr(each) for each in found]


def run(code: str, *arguments: str, **variables: str) -> list[str]:
    """What a program prints, line by line; it finds a Java, as a user's own Spark must."""
    known = environment("127.0.0.1") | {"SPARK_CONF_DIR": "/nowhere"} | variables
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.spark
def test_a_users_session_lives_on_with_its_settings(trace: Path, here: list[str]) -> None:
    """Whatever they are: these change how Spark reads times, casts, names and batches."""
    code = f"""{JOBS}
import json, logging, os, sys
from pyspark.sql import SparkSession
users = (
    SparkSession.builder.master("local[2]").appName("mine")
    .config("spark.sql.session.timeZone", "America/New_York").config("spark.sql.ansi.enabled", "false")
    .config("spark.sql.caseSensitive", "true").config("spark.sql.execution.arrow.maxRecordsPerBatch", "7000")
    .config("spark.sql.shuffle.partitions", "3")
    .getOrCreate()
)
def settings():
    context = users.sparkContext
    logs = [logging.getLogger(name).level for name in ("py4j", "pyspark")], logging.getLogger().filters
    return sorted(users.conf.getAll.items()), sorted(context.getConf().getAll()), dict(os.environ), logs
before = settings()
with spark_session(standing=True) as spark:
    assert spark is users
    found = said(sys.argv[1], spark)
assert settings() == before
assert SparkSession.active() is users
assert users.range(3).count() == 3
print(json.dumps(found))
"""
    (line,) = run(code, str(trace))
    assert json.loads(line) == here


@pytest.mark.spark
def test_a_context_of_the_users_lives_on() -> None:
    code = """if True:
        from pyspark import SparkContext
        from srtm.pipeline.session import spark_session
        context = SparkContext("local[1]", "mine")
        with spark_session() as spark:
            print(spark.sparkContext is context, spark.range(3).count())
        print(context.parallelize([1, 2]).sum())
    """
    assert run(code) == ["True 3", "3"]


def test_another_master_or_other_options_are_refused(spark: SparkSession) -> None:
    wanted = {"spark.sql.shuffle.partitions": "9", "spark.sql.session.timeZone": "UTC"}
    with pytest.raises(InputError, match=r"on local\[2\].*differs in spark.sql.shuffle.partitions:"):
        spark_session(options=wanted).__enter__()
    with pytest.raises(InputError, match=r"differs in spark\.master"):
        spark_session(master="local[1]").__enter__()
    with spark_session(master="local[2]", options={"spark.sql.shuffle.partitions": "2"}) as same:
        assert same is spark
    assert spark.range(3).count() == 3


def test_a_server_beside_a_driver_is_refused(spark: SparkSession, connect_server: Server) -> None:
    with pytest.raises(InputError, match=r"has a Spark session on local\[2\].*stop the session first"):
        spark_session(remote=connect_server.url).__enter__()
    assert spark.range(3).count() == 3


@pytest.mark.spark
def test_the_next_session_of_a_process_is_the_users_own() -> None:
    """The JVM that a session of SRTM's started stays, but nothing of that session does."""
    code = """if True:
        import logging, os
        from pyspark.sql import SparkSession
        from srtm.pipeline.session import spark_session
        tuned = {"SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE"}  # by PySpark itself
        def around():
            return {k: v for k, v in os.environ.items() if k not in tuned}, logging.getLogger().filters[:]
        before = around()
        with spark_session(master="local[1]", options={"spark.sql.shuffle.partitions": "3"}) as spark:
            print(spark.sparkContext.master, spark.conf.get("spark.sql.shuffle.partitions"))
        assert around() == before
        users = SparkSession.builder.master("local[2]").getOrCreate()
        print(users.sparkContext.master, users.conf.get("spark.sql.shuffle.partitions"), users.sparkContext.appName)
        print(users.sparkContext.getConf().get("spark.local.dir"))
        users.stop()
    """
    assert run(code) == ["local[1] 3", "local[2] 200 pyspark-shell", "None"]


@pytest.mark.spark
def test_sparks_configuration_decides_unless_a_master_is_given(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.master local[3]\nspark.sql.session.timeZone  CET\n")
    code = """if True:
        from srtm.pipeline.session import spark_session
        for master in (None, "local[1]"):
            with spark_session(master=master, standing=True) as spark:
                print(spark.sparkContext.master, spark.conf.get("spark.sql.session.timeZone"))
    """
    assert run(code, SPARK_CONF_DIR=str(tmp_path)) == ["local[3] CET", "local[1] CET"]


def test_options_are_read_as_spark_reads_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert configured() == {}
    defaults = "# a comment\n\n spark.master   spark://host:7077\nspark.a=b = c\nspark.d: e\nspark.f\n"
    (tmp_path / "spark-defaults.conf").write_text(defaults)
    read = {"spark.master": "spark://host:7077", "spark.a": "b = c", "spark.d": "e", "spark.f": ""}
    assert configured() == read
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master=yarn --conf 'spark.a=x=y z' -c spark.g=h pyspark-shell")
    assert configured() == read | {"spark.master": "yarn", "spark.a": "x=y z", "spark.g": "h"}
    (tmp_path / "other").write_text("spark.i j")
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"--properties-file {tmp_path}/other pyspark-shell")
    assert configured() == {"spark.i": "j"}


def test_a_users_session_on_a_server_lives_on(connect_server: Server) -> None:
    """And how many tasks run at once is a matter of the server, not of the client's cores."""
    code = """if True:
        import os, sys
        os.cpu_count = lambda: 77
        from pyspark.sql import SparkSession
        from srtm.pipeline.runtime.cores import parallelism
        from srtm.pipeline.session import spark_session
        url = sys.argv[1]
        users = SparkSession.builder.remote(url).getOrCreate()
        with spark_session(standing=True) as spark:
            print(spark is users)
        with spark_session(remote=url, options={"spark.sql.leafNodeDefaultParallelism": "5"}) as spark:
            print(spark is users, parallelism(spark), parallelism(users))
        print(SparkSession.active() is users, users.range(3).count())
    """
    cores = len(os.sched_getaffinity(0))
    assert run(code, connect_server.url) == ["True", f"False 5 {cores}", "True 3"]


def test_a_client_that_leaves_without_a_job_leaves_the_server_working(connect_server: Server) -> None:
    code = """if True:
        import sys
        from srtm.pipeline.session import spark_session
        with spark_session(remote=sys.argv[1]):
            pass
        with spark_session(remote=sys.argv[1]) as spark:
            print(spark.range(9).mapInArrow(lambda batches: batches, "id long").count())
    """
    assert run(code, connect_server.url) == ["9"]


def test_spark_submit_decides_where_a_script_runs(
    spark_cluster: Cluster, trace: Path, here: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""{JOBS}
import json, sys
with spark_session(standing=True) as spark:
    print(json.dumps([spark.sparkContext.master, spark.sparkContext.appName, said(sys.argv[1], spark)]))
""")
    options = [word for name, value in OPTIONS.items() for word in ("--conf", f"{name}={value}")]
    done = subprocess.run(
        [HOME / "bin" / "spark-submit", "--master", spark_cluster.master, *options, script, trace],
        env=environment("127.0.0.1") | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [spark_cluster.master, "script.py", here]


@pytest.mark.spark
def test_a_worker_on_another_network_without_the_package(trace: Path, here: list[str], tmp_path: Path) -> None:
    """Its executor reaches the driver at the address that the master sees, and gets the package from there."""
    code = f"""{JOBS}
import json, sys
options = json.loads(sys.argv[3])
with spark_session(master=sys.argv[2], options=options) as spark:
    def look(batches):
        import os, srtm
        from pathlib import Path
        import pyarrow as pa
        for batch in batches:
            yield pa.record_batch([pa.array([srtm.__file__ + " " + os.readlink("/proc/self/ns/net")])], ["found"])
    print(spark.range(1).mapInArrow(look, "found string").toArrow()["found"][0])
    print(spark.sparkContext.getConf().get("spark.driver.host"))
    print(json.dumps(said(sys.argv[1], spark)))
"""
    bare = without_srtm(tmp_path / "bare")
    with namespace() as apart, standalone(tmp_path, apart) as cluster:
        options = OPTIONS | {"spark.pyspark.python": str(bare)}
        known = {name: value for name, value in environment("").items() if name != "SPARK_LOCAL_IP"}
        command = [sys.executable, "-c", code, str(trace), cluster.master, json.dumps(options)]
        done = subprocess.run(command, env=known, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        where, host, found = done.stdout.splitlines()
        file, network = where.split()
        assert ".zip/srtm/" in file
        assert network != str(Path("/proc/self/ns/net").readlink())
        assert host == apart.outside
        assert json.loads(found) == here


def without_srtm(folder: Path) -> Path:
    """A Python that has every library of this one, but not this package."""
    venv.create(folder, symlinks=True, with_pip=False)
    packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    for entry in Path(sys.prefix, packages).iterdir():
        if "srtm" not in entry.name and entry.suffix != ".pth":
            (folder / packages / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", "import numba, srtm"], env=clean, capture_output=True, text=True, check=False)
    assert "No module named 'srtm'" in done.stderr
    return python
