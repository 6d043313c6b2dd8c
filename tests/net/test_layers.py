"""Layers against their other side: compression inside TLS, and answers that share a read with a new layer."""

from __future__ import annotations

import ssl

import pytest
import trustme

from srtm.net.compression import BadStream, Codec, Deflate, Snappy
from srtm.net.layers import Layers
from srtm.net.tls import Tls

CODECS = [lambda: Deflate(6), Snappy]


def test_nothing_stands_in_between_at_first() -> None:
    layers = Layers()
    assert layers.plain
    assert layers.decode(b"in") == b"in"
    assert layers.encode(b"out") == b"out"
    assert (layers.pending(), layers.end(), layers.rest(b"rest")) == (b"", b"", b"rest")


@pytest.mark.parametrize("new", CODECS)
def test_a_codec_takes_the_rest_of_the_read_that_started_it(new: type[Codec]) -> None:
    layers, server = Layers(), new()
    layers.start_codec(new())
    assert not layers.plain
    assert layers.rest(server.encode(b"first")) == b"first"
    large = bytes(1_000_000)  # more than one step of a codec gives
    assert layers.decode(server.encode(large)) == large
    assert server.decode(layers.encode(b"hello")) == b"hello"


def test_compression_runs_inside_tls() -> None:
    ca = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    ca.issue_cert("localhost").configure_cert(theirs)
    ca.configure_trust(ours)
    layers, server, codec = Layers(), Tls(theirs), Deflate(6)
    layers.start_tls(Tls(ours, "localhost"))
    while not server.ready:
        server.decode(layers.pending())
        layers.decode(server.pending())
    server.decode(layers.pending())
    layers.decode(server.pending())
    layers.start_codec(Deflate(6))
    assert codec.decode(server.decode(layers.encode(b"hello"))) == b"hello"
    assert layers.decode(server.encode(codec.encode(b"world"))) == b"world"
    server.decode(layers.end())
    assert server.ended


def test_a_broken_stream_is_said_to_be() -> None:
    layers = Layers()
    layers.start_codec(Deflate(6))
    with pytest.raises(BadStream):
        layers.decode(b"\xff" * 16)
