"""nsqd's own tests, run against our broker.

The tests come from nsqd's Go module. `tests/parts/nsqd_tests/broker.go` takes the place of the package that they test:
it starts a broker for each of them, and asks over TCP and HTTP what the tests look up in nsqd's memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

trustme = pytest.importorskip("trustme", reason="pip install trustme makes certificates for tests")

SHIM = ROOT / "tests/parts/nsqd_tests/broker.go"
FILES = [
    "http_test.go",
    "nsqd_test.go",
    "protocol_v2_test.go",
    "protocol_v2_unixsocket_test.go",
    "stats_test.go",
    "topic_test.go",
]
KEPT = [  # of nsqd's package: its options, its levels, and the format of messages
    "options.go",
    "logger.go",
    "message.go",
    "backend_queue.go",
    "buffer_pool.go",
]
PATIENCE_S = 120

# Of nsqd's insides, which nothing can see over the wire.
EXCLUDED = {
    "TestPutMessage": "reads a channel's Go channel",
    "TestPutMessage2Chan": "reads a channel's Go channel",
    "TestInFlightWorker": "puts messages in flight without a consumer",
    "TestChannelEmpty": "puts messages in flight without a consumer",
    "TestChannelEmptyConsumer": "makes a client without a connection",
    "TestMaxChannelConsumers": "makes a client without a connection",
    "TestChannelHealth": "replaces the disk queue",
    "TestHealth": "replaces the disk queue",
    "TestSetHealth": "sets the health of an nsqd that does not listen",
    "TestPriorityQueue": "tests a data structure",
    "TestUnsortedInsert": "tests a data structure",
    "TestRemove": "tests a data structure",
    "TestStartup": "reads nsqd's metadata file and a channel's Go channel",
    "TestPauseMetadata": "reads nsqd's metadata file",
    "TestEphemeralTopicsAndChannels": "makes a client without a connection",
    "TestReconfigure": "reads nsqd's list of lookup peers",
    "TestStatsChannelLocking": "puts messages in flight without a consumer",
    "TestGetTopic": "compares pointers of topics",
    "TestGetChannel": "compares pointers of channels",
    "TestChannelTopicNames": "calls a function of nsqd's, and asks no server",
    "TestReqTimeoutRange": "reads when a requeued message is due",
    "TestUnixSocketReqTimeoutRange": "reads when a requeued message is due",
    "TestIOLoopReturnsClientErrWhenSendFails": "calls nsqd's protocol without a socket",
    "TestIOLoopReturnsClientErrWhenSendSucceeds": "calls nsqd's protocol without a socket",
    "TestUnixSocketIOLoopReturnsClientErrWhenSendFails": "calls nsqd's protocol without a socket",
    "TestUnixSocketIOLoopReturnsClientErrWhenSendSucceeds": "calls nsqd's protocol without a socket",
}
OVER_TCP = [
    "BasicV2",
    "MultipleConsumerV2",
    "ClientTimeout",
    "ClientHeartbeat",
    "ClientHeartbeatDisableSUB",
    "ClientHeartbeatDisable",
    "MaxHeartbeatIntervalValid",
    "MaxHeartbeatIntervalInvalid",
    "Pausing",
    "EmptyCommand",
    "SizeLimits",
    "DPUB",
    "Touch",
    "MaxRdyCount",
    "FatalError",
    "OutputBuffering",
    "OutputBufferingValidity",
    "TLS",
    "TLSRequired",
    "TLSAuthRequire",
    "TLSAuthRequireVerify",
    "Deflate",
    "Snappy",
    "TLSDeflate",
    "Sampling",
    "TLSSnappy",
    "ClientMsgTimeout",
    "BadFin",
]
OTHERS = [
    "HTTPpub",
    "HTTPpubEmpty",
    "HTTPmpub",
    "HTTPmpubEmpty",
    "HTTPmpubBinary",
    "HTTPmpubForNonNormalizedBinaryParam",
    "HTTPpubDefer",
    "HTTPSRequire",
    "HTTPSRequireVerify",
    "TLSRequireVerifyExceptHTTP",
    "HTTPV1TopicChannel",
    "HTTPClientStats",
    "HTTPgetStatusJSON",
    "HTTPgetStatusText",
    "HTTPconfig",
    "HTTPerrors",
    "DeleteTopic",
    "EmptyTopic",
    "EmptyChannel",
    "Info",
    "Cluster",
    "UnixSocketStartup",
    "ClientAuth",
    "Stats",
    "ClientAttributes",
    "Deletes",
    "DeleteLast",
    "Pause",
]
TESTS = [f"Test{name}" for name in [*OVER_TCP, *(f"UnixSocket{name}" for name in OVER_TCP), *OTHERS]]

# What tests look up in nsqd's memory, asked of the broker instead. An id is the broker's to choose.
OVER_THE_WIRE = [
    (r"test\.Equal\(t, msg\.ID, msgOut\.ID\)", "sameMessage(t, msg, msgOut)"),
    (r"(?m)^\t+\w+\.(?:deferred|inFlight)Mutex\.(?:Lock|Unlock)\(\)\n", ""),
    (r"len\((\w+)\.deferredMessages\)", r"\1.counts().deferred"),
    (r"len\((\w+)\.inFlightMessages\)", r"\1.counts().inFlight"),
    (r"int\(atomic\.LoadUint64\(&(\w+)\.messageCount\)\)", r"\1.counts().messages"),
    (r"int\(atomic\.LoadUint64\(&(\w+)\.timeoutCount\)\)", r"\1.counts().timedOut"),
    (r"int\(atomic\.LoadUint64\(&(\w+)\.requeueCount\)\)", r"\1.counts().requeued"),
    (r"uint64\(0\), channel\.timeoutCount", "0, channel.counts().timedOut"),
    (r"msg = <-channel\.memoryMsgChan", "msg = channel.takeWaiting(t, msg)"),
    (r"len\(topic\.channelMap\)", "topic.channels()"),
    (r"len\(nsqd\.topicMap\)", "nsqd.topics()"),
    (r"nsqd\.startTime = testTime", "testTime = nsqd.started()\n\t_ = testTime"),
]
_HELPERS = re.compile(r"getMetadata|[bB]enchmark\w+|test(?:UnixSocket)?IOLoopReturnsClientErr")


def ported(text: str) -> str:
    """A file of nsqd's tests without what is excluded, asking over the wire."""
    text = _without_excluded(text)
    for pattern, instead in OVER_THE_WIRE:
        text = re.sub(pattern, instead, text)
    head, _, body = text.partition("\n)\n")
    used = [line for line in head.splitlines() if not line.startswith("\t") or _is_used(line, body)]
    return "\n".join(used) + "\n)\n" + body


def _without_excluded(text: str) -> str:
    """Leave out functions, which gofmt ends with a brace in the first column, or on their own line."""
    kept, leaving = [], False
    for line in text.splitlines(keepends=True):
        if found := re.match(r"func (\w+)\(", line):
            leaving = found[1] in EXCLUDED or _HELPERS.fullmatch(found[1]) is not None
        if not leaving:
            kept.append(line)
        elif line == "}\n" or (line.startswith("func") and line.endswith("}\n")):
            leaving = False
    return "".join(kept)


def _is_used(line: str, body: str) -> bool:
    """Whether a file needs an import; Go refuses one that it does not."""
    name = line.strip().strip('"').rpartition("/")[2].removeprefix("go-")
    return not name or re.search(rf"\b{name}\.", body) is not None


def certify(folder: Path) -> None:
    """Write certificates under the names of nsqd's, which have expired, or are too weak for OpenSSL."""
    ours, stranger = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(folder / "ca.pem")
    stranger.cert_pem.write_to_path(folder / "stranger.pem")
    for authority, cert, key in [
        (ours, "server.pem", "server.key"),
        (ours, "client.pem", "client.key"),
        (stranger, "cert.pem", "key.pem"),
    ]:
        issued = authority.issue_cert("test.local", common_name="test.local")
        issued.private_key_pem.write_to_path(folder / key)
        (folder / cert).write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))


def module() -> Path:
    """The folder of nsqd's Go module."""
    told = ["go", "list", "-m", "-f", "{{.Dir}}", "github.com/nsqio/nsq"]
    found = subprocess.run(told, cwd=ROOT / "tests/parts", capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of all tests, in a folder with their certificates."""
    source, target = module(), tmp_path_factory.mktemp("nsq")
    for folder in ("internal", "nsqlookupd", "nsqd/test"):
        shutil.copytree(source / folder, target / folder, copy_function=shutil.copyfile)
    for name in ["go.mod", "go.sum", *(f"nsqd/{each}" for each in KEPT)]:
        shutil.copyfile(source / name, target / name)
    shutil.copyfile(SHIM, target / "nsqd/broker.go")
    certify(target / "nsqd/test/certs")
    for name in FILES:
        (target / "nsqd" / name).write_text(ported((source / "nsqd" / name).read_text()))
    told = ["go", "test", "-c", "-o", "suite", "./nsqd"]
    # Go's own cache, which has what tests/parts/build compiled, is not in the folder that tests use as their cache.
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    built = subprocess.run(told, cwd=target, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    return target / "suite"


@pytest.mark.needs("go")
def test_every_test_of_nsqds_is_run_or_excluded_with_a_reason() -> None:
    texts = [path.read_text() for path in (module() / "nsqd").glob("*_test.go")]
    found = [name for text in texts for name in re.findall(r"(?m)^func (Test\w+)", text)]
    assert sorted(found) == sorted([*TESTS, *EXCLUDED])


@pytest.mark.needs("go")
@pytest.mark.parametrize("name", TESTS)
def test_of_nsqd(name: str, suite: Path) -> None:
    environment = {**os.environ, "SRTM_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [str(suite), "-test.v", f"-test.run=^{name}$"],
        cwd=suite.parent / "nsqd",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
    )
    assert (done.returncode, f"--- PASS: {name}" in done.stdout) == (0, True), done.stdout + done.stderr
