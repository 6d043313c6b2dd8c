"""Conversations with a server of V2: what is sent, and every frame that comes back.

The table is true of nsqd 1.3.0 (test_transcripts.py asks it), and holds for whatever claims to speak its protocol.
`run` speaks it to an address. In both columns @T stands for a topic of this run alone and @ID for the id of the message
that came last. Left out of the comparison, since they differ from run to run: ids (16 lower-case hex digits),
timestamps (nanoseconds), the version in the answer to IDENTIFY, heartbeats. `DEPARTURES` is what nsqd answers
otherwise; docs/protocol.md says why.
"""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from struct import pack, unpack

ERROR, MESSAGE, RESPONSE = 1, 2, 0
MAGIC = b"  V2"

Frame = tuple[int, bytes]
Step = tuple[bytes, tuple[Frame, ...]]


@dataclass(frozen=True)
class Transcript:
    """Steps of bytes sent and frames that answer them; then the server `closes`, or can still be talked to."""

    name: str
    steps: tuple[Step, ...]
    closes: bool = False
    shut: bool = False  # the client sends no more, but listens on
    flags: tuple[str, ...] = ()  # nsqd's command line


def ok(data: bytes = b"OK") -> Frame:
    return RESPONSE, data


def err(data: bytes) -> Frame:
    return ERROR, data


def msg(body: bytes, attempts: int = 1) -> Frame:
    return MESSAGE, b"%d:%b" % (attempts, body)


def n(number: int) -> bytes:
    return pack(">i", number)


def sized(body: bytes) -> bytes:
    return n(len(body)) + body


def mpub(*bodies: bytes) -> bytes:
    return b"MPUB @T\n" + sized(n(len(bodies)) + b"".join(sized(body) for body in bodies))


def identify(**fields: object) -> bytes:
    return b"IDENTIFY\n" + sized(json.dumps(fields).encode())


def good(name: str, *steps: Step) -> Transcript:
    return Transcript(name, _greet(steps))


def bad(name: str, sent: bytes, error: bytes, *before: Step, flags: tuple[str, ...] = ()) -> Transcript:
    """The last thing sent is refused, and the connection closed."""
    return Transcript(name, _greet((*before, (sent, (err(error),)))), closes=True, flags=flags)


def cut(name: str, sent: bytes, *frames: Frame) -> Transcript:
    """The client stops sending in the middle of something."""
    return Transcript(name, _greet(((sent, frames),)), closes=True, shut=True)


def _greet(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    (sent, frames), *rest = steps
    return ((MAGIC + sent, frames), *rest)


SETTLED = {
    "max_rdy_count": 2500,
    "version": "*",
    "max_msg_timeout": 900000,
    "msg_timeout": 60000,
    "tls_v1": False,
    "deflate": False,
    "deflate_level": 6,
    "max_deflate_level": 6,
    "snappy": False,
    "sample_rate": 0,
    "auth_required": False,
    "output_buffer_size": 16384,
    "output_buffer_timeout": 250,
}


def settled(**changes: object) -> Frame:
    return ok(json.dumps({**SETTLED, **changes}, separators=(",", ":")).encode())


SUB: Step = (b"SUB @T ch\n", (ok(),))
ONE: Step = (b"PUB @T\n" + sized(b"one"), (ok(),))
GET: Step = (b"RDY 1\n", (msg(b"one"),))
MIB = 1024 * 1024
N64 = b"a" * 64
NO_ID = b"0123456789abcdef"
LATE = b" failed ID not in flight"
STATE = b"E_INVALID cannot %b in current state"
HELD = (ONE, SUB, GET)

TRANSCRIPTS = [
    # the beginning
    good("magic alone", (b"", ())),
    Transcript("bad magic", ((b"  V1", (err(b"E_BAD_PROTOCOL"),)),), closes=True),
    Transcript("HTTP on the wrong port", ((b"GET ", (err(b"E_BAD_PROTOCOL"),)),), closes=True),
    Transcript("half a magic", ((b"  ", ()),), closes=True, shut=True),
    # lines
    bad("unknown verb", b"HELLO x\n", b"E_INVALID invalid command HELLO"),
    bad("verbs are upper case", b"pub @T\n", b"E_INVALID invalid command pub"),
    bad("empty line", b"\n", b"E_INVALID invalid command "),
    bad("only a CR", b"\r\n", b"E_INVALID invalid command "),
    bad("leading space", b" NOP\n", b"E_INVALID invalid command "),
    bad("tab is no space", b"NOP\tx\n", b"E_INVALID invalid command NOP\tx"),
    bad("verb that is no text", b"\xff\x00\n", b"E_INVALID invalid command \xff\x00"),
    bad("two CR", b"NOP\r\r\n", b"E_INVALID invalid command NOP\r"),
    good("NOP", (b"NOP\nNOP x y\nNOP\r\n", ())),
    cut("line without end", b"NO"),
    # IDENTIFY
    good("IDENTIFY without negotiation", (identify(client_id="x"), (ok(),))),
    good("IDENTIFY spare params", (b"IDENTIFY a b\n" + sized(b"{}"), (ok(),))),
    good("IDENTIFY CR", (b"IDENTIFY\r\n" + sized(b"{}"), (ok(),))),
    good("IDENTIFY null", (b"IDENTIFY\n" + sized(b"null"), (ok(),))),
    good("IDENTIFY twice", (identify(feature_negotiation=True, msg_timeout=2000), (settled(msg_timeout=2000),)),
         (identify(feature_negotiation=True), (settled(msg_timeout=2000),))),
    good("IDENTIFY defaults", (identify(feature_negotiation=True), (settled(),))),
    good("IDENTIFY any case", (b"IDENTIFY\n" + sized(b'{"Feature_Negotiation":true,"MSG_TIMEOUT":1000}'),
                               (settled(msg_timeout=1000),))),
    good("IDENTIFY nulls", (identify(feature_negotiation=True, msg_timeout=None, client_id=None), (settled(),))),
    good("IDENTIFY unknown fields", (identify(feature_negotiation=True, short_id="a", long_id="b", x=[{}]),
                                     (settled(),))),
    good("IDENTIFY bad UTF-8 in a string", (b"IDENTIFY\n" + sized(b'{"client_id":"\xff\xfe"}'), (ok(),))),
    good("IDENTIFY lone surrogate", (b"IDENTIFY\n" + sized(b'{"client_id":"\\ud800"}'), (ok(),))),
    good("IDENTIFY output buffer", (identify(feature_negotiation=True, output_buffer_size=64, output_buffer_timeout=25),
                                    (settled(output_buffer_size=64, output_buffer_timeout=25),))),
    good("IDENTIFY no output buffer", (identify(feature_negotiation=True, output_buffer_size=-1),
                                       (settled(output_buffer_size=1, output_buffer_timeout=0),))),
    good("IDENTIFY no buffer timeout", (identify(feature_negotiation=True, output_buffer_timeout=-1),
                                        (settled(output_buffer_timeout=0),))),
    good("IDENTIFY limits", (identify(feature_negotiation=True, output_buffer_size=65536, output_buffer_timeout=30000,
                                      heartbeat_interval=60000, msg_timeout=900000, sample_rate=99),
                             (settled(output_buffer_size=65536, output_buffer_timeout=30000, msg_timeout=900000,
                                      sample_rate=99),))),
    good("IDENTIFY deflate level without deflate", (identify(feature_negotiation=True, deflate_level=3), (settled(),))),
    good("IDENTIFY tls without certificate", (identify(feature_negotiation=True, tls_v1=True), (settled(),))),
    bad("IDENTIFY two compressions", identify(feature_negotiation=True, deflate=True, snappy=True),
        b"E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"),
    good("IDENTIFY two compressions, not negotiating", (identify(deflate=True, snappy=True), (ok(),))),
    bad("IDENTIFY heartbeat too short", identify(heartbeat_interval=999),
        b"E_BAD_BODY IDENTIFY heartbeat interval (999) is invalid"),
    bad("IDENTIFY heartbeat too long", identify(heartbeat_interval=60001),
        b"E_BAD_BODY IDENTIFY heartbeat interval (60001) is invalid"),
    bad("IDENTIFY heartbeat -2", identify(heartbeat_interval=-2),
        b"E_BAD_BODY IDENTIFY heartbeat interval (-2) is invalid"),
    bad("IDENTIFY buffer size", identify(output_buffer_size=63),
        b"E_BAD_BODY IDENTIFY output buffer size (63) is invalid"),
    bad("IDENTIFY buffer size too big", identify(output_buffer_size=65537),
        b"E_BAD_BODY IDENTIFY output buffer size (65537) is invalid"),
    bad("IDENTIFY buffer timeout", identify(output_buffer_timeout=24),
        b"E_BAD_BODY IDENTIFY output buffer timeout (24) is invalid"),
    bad("IDENTIFY timeout is judged before size", identify(output_buffer_timeout=30001, output_buffer_size=1),
        b"E_BAD_BODY IDENTIFY output buffer timeout (30001) is invalid"),
    bad("IDENTIFY sample rate", identify(sample_rate=100), b"E_BAD_BODY IDENTIFY sample rate (100) is invalid"),
    bad("IDENTIFY sample rate below 0", identify(sample_rate=-1), b"E_BAD_BODY IDENTIFY sample rate (-1) is invalid"),
    bad("IDENTIFY msg timeout", identify(msg_timeout=999), b"E_BAD_BODY IDENTIFY msg timeout (999) is invalid"),
    bad("IDENTIFY msg timeout too long", identify(msg_timeout=900001),
        b"E_BAD_BODY IDENTIFY msg timeout (900001) is invalid"),
    bad("IDENTIFY heartbeat is judged first", identify(heartbeat_interval=1, msg_timeout=1, sample_rate=-1),
        b"E_BAD_BODY IDENTIFY heartbeat interval (1) is invalid"),
    *[
        bad(f"IDENTIFY {body!r}", b"IDENTIFY\n" + sized(body), b"E_BAD_BODY IDENTIFY failed to decode JSON body")
        for body in (
            b"{", b" ", b"[]", b'"x"', b"1", b"{}x", b'{"client_id":1}', b'{"msg_timeout":1000.0}', b"\xff",
            b'{"msg_timeout":1e3}', b'{"msg_timeout":"1000"}', b'{"tls_v1":1}', b'{"sample_rate":2147483648}',
            b'{"msg_timeout":9223372036854775808}', b'{"msg_timeout":true}', b'{"x":NaN}', b'{"x":Infinity}',
            b"{'a':1}", b'{"a":1,}', b'{"client_id":"\n"}', b"\xef\xbb\xbf{}",
        )
    ],
    bad("IDENTIFY size 0", b"IDENTIFY\n" + n(0), b"E_BAD_BODY IDENTIFY invalid body size 0"),
    bad("IDENTIFY size -1", b"IDENTIFY\n" + n(-1), b"E_BAD_BODY IDENTIFY invalid body size -1"),
    bad("IDENTIFY too big", b"IDENTIFY\n" + n(5 * MIB + 1), b"E_BAD_BODY IDENTIFY body too big 5242881 > 5242880"),
    bad("IDENTIFY after SUB", identify(), STATE % b"IDENTIFY", SUB),
    cut("IDENTIFY cut in size", b"IDENTIFY\n\0\0", err(b"E_BAD_BODY IDENTIFY failed to read body size")),
    cut("IDENTIFY cut in body", b"IDENTIFY\n" + n(5) + b"{", err(b"E_BAD_BODY IDENTIFY failed to read body")),
    # AUTH
    bad("AUTH where there is none", b"AUTH\n" + sized(b"secret"), b"E_AUTH_DISABLED AUTH disabled"),
    bad("AUTH params", b"AUTH x\n", b"E_INVALID AUTH invalid number of parameters"),
    bad("AUTH size 0", b"AUTH\n" + n(0), b"E_BAD_BODY AUTH invalid body size 0"),
    bad("AUTH too big", b"AUTH\n" + n(2**31 - 1), b"E_BAD_BODY AUTH body too big 2147483647 > 5242880"),
    bad("AUTH after SUB", b"AUTH\n" + sized(b"secret"), STATE % b"AUTH", SUB),
    cut("AUTH cut in size", b"AUTH\n", err(b"E_BAD_BODY AUTH failed to read body size")),
    cut("AUTH cut in body", b"AUTH\n" + n(9), err(b"E_BAD_BODY AUTH failed to read body")),
    # SUB
    good("SUB", SUB),
    good("SUB spare params", (b"SUB @T ch x\n", (ok(),))),
    good("SUB ephemeral", (b"SUB @T#ephemeral ch#ephemeral\n", (ok(),))),
    bad("SUB twice", b"SUB @T ch\n", STATE % b"SUB", SUB),
    bad("SUB one param", b"SUB @T\n", b"E_INVALID SUB insufficient number of parameters"),
    bad("SUB bad topic", b"SUB a$ ch\n", b'E_BAD_TOPIC SUB topic name "a$" is not valid'),
    bad("SUB no topic", b"SUB  ch\n", b'E_BAD_TOPIC SUB topic name "" is not valid'),
    bad("SUB bad channel", b"SUB @T a$\n", b'E_BAD_CHANNEL SUB channel name "a$" is not valid'),
    bad("SUB no channel", b"SUB @T \n", b'E_BAD_CHANNEL SUB channel name "" is not valid'),
    bad("SUB without heartbeats", b"SUB @T ch\n", b"E_INVALID cannot SUB with heartbeats disabled",
        (identify(heartbeat_interval=-1), (ok(),))),
    bad("SUB without heartbeats comes before params", b"SUB\n", b"E_INVALID cannot SUB with heartbeats disabled",
        (identify(heartbeat_interval=-1), (ok(),))),
    good("SUB with heartbeats again", (identify(heartbeat_interval=-1) + identify(heartbeat_interval=1000)
                                       + b"SUB @T ch\n", (ok(), ok(), ok()))),
    # PUB
    good("PUB", ONE),
    good("PUB pipelined", ((b"PUB @T\n" + sized(b"x")) * 3 + b"NOP\n", (ok(), ok(), ok()))),
    good("PUB spare params", (b"PUB @T x\n" + sized(b"x"), (ok(),))),
    good("PUB CR", (b"PUB @T\r\n" + sized(b"x"), (ok(),))),
    good("PUB name of 64", (b"PUB " + N64 + b"\n" + sized(b"x"), (ok(),))),
    good("PUB every character", (b"PUB .aZ09_-#ephemeral\n" + sized(b"x"), (ok(),))),
    good("PUB after SUB", SUB, ONE),
    good("PUB largest", (b"PUB @T\n" + sized(b"x" * MIB), (ok(),))),
    bad("PUB without topic", b"PUB\n", b"E_INVALID PUB insufficient number of parameters"),
    bad("PUB empty topic", b"PUB \n", b'E_BAD_TOPIC PUB topic name "" is not valid'),
    bad("PUB two spaces", b"PUB  @T\n", b'E_BAD_TOPIC PUB topic name "" is not valid'),
    bad("PUB name of 65", b"PUB " + N64 + b"a\n", b'E_BAD_TOPIC PUB topic name "' + N64 + b'a" is not valid'),
    bad("PUB only ephemeral", b"PUB #ephemeral\n", b'E_BAD_TOPIC PUB topic name "#ephemeral" is not valid'),
    bad("PUB ephemeral twice", b"PUB a#ephemeral#ephemeral\n",
        b'E_BAD_TOPIC PUB topic name "a#ephemeral#ephemeral" is not valid'),
    bad("PUB name that needs quoting", b'PUB "\\\x00\x07\x7f\xff\t\r\n',
        b'E_BAD_TOPIC PUB topic name "\\"\\\\\\x00\\a\\x7f\\xff\\t" is not valid'),
    bad("PUB name in UTF-8", "PUB é\u200b\U0001f600\U000e0001\xa0\n".encode(),
        'E_BAD_TOPIC PUB topic name "é\\u200b\U0001f600\\U000e0001\\u00a0" is not valid'.encode()),
    bad("PUB broken UTF-8", b"PUB \xe2\x82\xed\xa0\x80\xc0\xaf\n",
        rb'E_BAD_TOPIC PUB topic name "\xe2\x82\xed\xa0\x80\xc0\xaf" is not valid'),
    bad("PUB replacement character", "PUB \ufffd\n".encode(),
        'E_BAD_TOPIC PUB topic name "\ufffd" is not valid'.encode()),
    bad("PUB size 0", b"PUB @T\n" + n(0), b"E_BAD_MESSAGE PUB invalid message body size 0"),
    bad("PUB size -1", b"PUB @T\n" + n(-1), b"E_BAD_MESSAGE PUB invalid message body size -1"),
    bad("PUB smallest size", b"PUB @T\n" + n(-(2**31)), b"E_BAD_MESSAGE PUB invalid message body size -2147483648"),
    bad("PUB too big", b"PUB @T\n" + n(MIB + 1), b"E_BAD_MESSAGE PUB message too big 1048577 > 1048576"),
    bad("PUB too big after a good one", b"PUB @T\n" + n(2**31 - 1),
        b"E_BAD_MESSAGE PUB message too big 2147483647 > 1048576", ONE),
    bad("PUB size 0 after a good one", b"PUB @T\n" + n(0), b"E_BAD_MESSAGE PUB invalid message body size 0", ONE),
    cut("PUB cut in size", b"PUB @T\n\0\0\0", err(b"E_BAD_MESSAGE PUB failed to read message body size")),
    cut("PUB cut in body", b"PUB @T\n" + n(5) + b"abcd", err(b"E_BAD_MESSAGE PUB failed to read message body")),
    cut("PUB cut before its line ends", b"PUB @T"),
    # DPUB
    good("DPUB", (b"DPUB @T 100\n" + sized(b"x"), (ok(),))),
    good("DPUB delivers", (b"DPUB @T 0\n" + sized(b"one"), (ok(),)), SUB, GET),
    good("DPUB longest", (b"DPUB @T 3600000\n" + sized(b"x"), (ok(),))),
    good("DPUB no digits is 0", (b"DPUB @T \n" + sized(b"x"), (ok(),))),
    good("DPUB wraps at 64 bits", (b"DPUB @T 18446744073709551616\n" + sized(b"x"), (ok(),))),
    bad("DPUB one param", b"DPUB @T\n", b"E_INVALID DPUB insufficient number of parameters"),
    bad("DPUB bad topic", b"DPUB $ 1\n", b'E_BAD_TOPIC DPUB topic name "$" is not valid'),
    bad("DPUB no number", b"DPUB @T 1x\n", b"E_INVALID DPUB could not parse timeout 1x"),
    bad("DPUB sign", b"DPUB @T -1\n", b"E_INVALID DPUB could not parse timeout -1"),
    bad("DPUB too long", b"DPUB @T 3600001\n", b"E_INVALID DPUB timeout 3600001 out of range 0-3600000"),
    bad("DPUB wraps to below 0", b"DPUB @T 18446744073709551615\n",
        b"E_INVALID DPUB timeout 18446744073709551615 out of range 0-3600000"),
    bad("DPUB size 0", b"DPUB @T 1\n" + n(0), b"E_BAD_MESSAGE DPUB invalid message body size 0"),
    bad("DPUB too big", b"DPUB @T 1\n" + n(MIB + 1), b"E_BAD_MESSAGE DPUB message too big 1048577 > 1048576"),
    cut("DPUB cut in size", b"DPUB @T 1\n\0", err(b"E_BAD_MESSAGE DPUB failed to read message body size")),
    cut("DPUB cut in body", b"DPUB @T 1\n" + n(5) + b"a", err(b"E_BAD_MESSAGE DPUB failed to read message body")),
    # MPUB
    good("MPUB", (mpub(b"a", b"bb", b"ccc"), (ok(),))),
    good("MPUB one", (mpub(b"one"), (ok(),)), SUB, GET),
    good("MPUB and more", (mpub(b"a") + b"NOP\n" + mpub(b"b"), (ok(), ok()))),
    bad("MPUB without topic", b"MPUB\n", b"E_INVALID MPUB insufficient number of parameters"),
    bad("MPUB bad topic", b"MPUB $\n", b'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "$" is not valid'),
    bad("MPUB size 0", b"MPUB @T\n" + n(0), b"E_BAD_BODY MPUB invalid body size 0"),
    bad("MPUB size -5", b"MPUB @T\n" + n(-5), b"E_BAD_BODY MPUB invalid body size -5"),
    bad("MPUB too big", b"MPUB @T\n" + n(5 * MIB + 1), b"E_BAD_BODY MPUB body too big 5242881 > 5242880"),
    bad("MPUB count 0", b"MPUB @T\n" + n(100) + n(0), b"E_BAD_BODY MPUB invalid message count 0"),
    bad("MPUB count -1", b"MPUB @T\n" + n(100) + n(-1), b"E_BAD_BODY MPUB invalid message count -1"),
    bad("MPUB count impossible", b"MPUB @T\n" + n(100) + n(1048576), b"E_BAD_BODY MPUB invalid message count 1048576"),
    bad("MPUB message of 0", b"MPUB @T\n" + n(100) + n(2) + sized(b"a") + n(0),
        b"E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
    bad("MPUB message of -1", b"MPUB @T\n" + n(100) + n(1) + n(-1),
        b"E_BAD_MESSAGE MPUB invalid message(0) body size -1"),
    bad("MPUB message too big", b"MPUB @T\n" + n(4 * MIB) + n(1) + n(MIB + 1),
        b"E_BAD_MESSAGE MPUB message too big 1048577 > 1048576"),
    cut("MPUB cut in size", b"MPUB @T\n\0", err(b"E_BAD_BODY MPUB failed to read body size")),
    cut("MPUB cut in count", b"MPUB @T\n" + n(50) + b"\0", err(b"E_BAD_BODY MPUB failed to read message count")),
    cut("MPUB cut before a message", b"MPUB @T\n" + n(50) + n(2) + sized(b"abc"),
        err(b"E_BAD_MESSAGE MPUB failed to read message(1) body size")),
    cut("MPUB cut in a message's size", b"MPUB @T\n" + n(50) + n(2) + sized(b"abc") + b"\0\0\0",
        err(b"E_BAD_MESSAGE MPUB failed to read message(1) body size")),
    cut("MPUB cut after a message's size", b"MPUB @T\n" + n(50) + n(1) + n(3),
        err(b"E_BAD_MESSAGE MPUB failed to read message body")),
    cut("MPUB cut in a message", b"MPUB @T\n" + n(50) + n(1) + n(3) + b"ab",
        err(b"E_BAD_MESSAGE MPUB failed to read message body")),
    # RDY
    good("RDY", SUB, (b"RDY 1\nRDY 0\nRDY 2500\nRDY\nRDY 0 x\n", ())),
    good("RDY no digits is 0", SUB, (b"RDY \n", ()), ONE, (b"RDY\n", (msg(b"one"),))),
    good("RDY wraps at 64 bits", SUB, (b"RDY 18446744073709551617\n", ())),
    good("RDY many zeros", SUB, (b"RDY " + b"0" * 5000 + b"1\n", ())),
    bad("RDY before SUB", b"RDY 1\n", STATE % b"RDY"),
    bad("RDY too many", b"RDY 2501\n", b"E_INVALID RDY count 2501 out of range 0-2500", SUB),
    bad("RDY sign", b"RDY -1\n", b"E_INVALID RDY could not parse count -1", SUB),
    bad("RDY plus", b"RDY +1\n", b"E_INVALID RDY could not parse count +1", SUB),
    bad("RDY no number", b"RDY \xff1\n", b"E_INVALID RDY could not parse count \xff1", SUB),
    bad("RDY wraps to below 0", b"RDY 18446744073709551615\n", b"E_INVALID RDY count -1 out of range 0-2500", SUB),
    # FIN, REQ, TOUCH
    good("FIN", *HELD, (b"FIN @ID\n", ())),
    good("FIN CR and spare params", *HELD, (b"FIN @ID x\r\n", ())),
    good("FIN twice", *HELD, (b"FIN @ID\n", ()), (b"FIN @ID\n", (err(b"E_FIN_FAILED FIN @ID" + LATE),))),
    good("FIN unknown", SUB, (b"FIN " + NO_ID + b"\nNOP\n", (err(b"E_FIN_FAILED FIN " + NO_ID + LATE),))),
    good("FIN unknown, any bytes", SUB, (b"FIN \xff\x00" + NO_ID[2:] + b"\n",
                                         (err(b"E_FIN_FAILED FIN \xff\x00" + NO_ID[2:] + LATE),))),
    bad("FIN before SUB", b"FIN " + NO_ID + b"\n", STATE % b"FIN"),
    bad("FIN without id", b"FIN\n", b"E_INVALID FIN insufficient number of params", SUB),
    bad("FIN short id", b"FIN " + NO_ID[1:] + b"\n", b"E_INVALID invalid message ID", SUB),
    bad("FIN short id and CR", b"FIN " + NO_ID[1:] + b"\r\n", b"E_INVALID invalid message ID", SUB),
    bad("FIN id with a space", b"FIN 0123456 89abcdef\n", b"E_INVALID invalid message ID", SUB),
    bad("FIN long id", b"FIN " + NO_ID + b"0\n", b"E_INVALID invalid message ID", SUB),
    good("REQ delivers again", *HELD, (b"REQ @ID 0\n", (msg(b"one", 2),)), (b"FIN @ID\n", ())),
    good("REQ later", *HELD, (b"REQ @ID 99999999999\n", ()),
         (b"FIN @ID\n", (err(b"E_FIN_FAILED FIN @ID" + LATE),))),
    good("REQ no digits is 0", *HELD, (b"REQ @ID \n", (msg(b"one", 2),))),
    good("REQ unknown", SUB, (b"REQ " + NO_ID + b" 0\n",
                              (err(b"E_REQ_FAILED REQ " + NO_ID + LATE),))),
    bad("REQ before SUB", b"REQ " + NO_ID + b" 0\n", STATE % b"REQ"),
    bad("REQ one param", b"REQ " + NO_ID + b"\n", b"E_INVALID REQ insufficient number of params", SUB),
    bad("REQ id comes before timeout", b"REQ x y\n", b"E_INVALID invalid message ID", SUB),
    bad("REQ no number", b"REQ " + NO_ID + b" -1\n", b"E_INVALID REQ could not parse timeout -1", SUB),
    good("TOUCH", *HELD, (b"TOUCH @ID\nTOUCH @ID\nFIN @ID\n", ())),
    good("TOUCH unknown", SUB, (b"TOUCH " + NO_ID + b"\n",
                                (err(b"E_TOUCH_FAILED TOUCH " + NO_ID + LATE),))),
    bad("TOUCH before SUB", b"TOUCH " + NO_ID + b"\n", STATE % b"TOUCH"),
    bad("TOUCH without id", b"TOUCH\n", b"E_INVALID TOUCH insufficient number of params", SUB),
    bad("TOUCH bad id", b"TOUCH x\n", b"E_INVALID invalid message ID", SUB),
    # CLS
    good("CLS", SUB, (b"CLS\n", (ok(b"CLOSE_WAIT"),))),
    good("CLS lets a consumer finish", *HELD, (b"CLS x\n", (ok(b"CLOSE_WAIT"),)),
         (b"TOUCH @ID\nFIN @ID\nRDY 5\nRDY nonsense\n", ()), ONE),
    bad("CLS before SUB", b"CLS\n", STATE % b"CLS"),
    bad("CLS twice", b"CLS\n", STATE % b"CLS", SUB, (b"CLS\n", (ok(b"CLOSE_WAIT"),))),
    bad("SUB after CLS", b"SUB @T ch\n", STATE % b"SUB", SUB, (b"CLS\n", (ok(b"CLOSE_WAIT"),))),
    # what stands before an error still counts, what stands after it does not
    Transcript("error amid commands",
               ((MAGIC + b"PUB @T\n" + sized(b"a") + b"HELLO\n" + b"PUB @T\n" + sized(b"b"),
                 (ok(), err(b"E_INVALID invalid command HELLO"))),), closes=True),
]  # fmt: skip

# Ours alone. At the first two nsqd closes without a word, and it reads an MPUB by its count, past the announced size.
DEPARTURES = [
    bad("line too long", b"NOP " + b"x" * (16 * 1024 - 4) + b"\n", b"E_INVALID line is longer than 16384 bytes"),
    bad("line without end", b"x" * 16 * 1024, b"E_INVALID line is longer than 16384 bytes"),
    bad("MPUB size below its count", b"MPUB @T\n" + n(3) + n(1) + sized(b"a"),
        b"E_BAD_BODY MPUB failed to read message count"),
    bad("MPUB size below its messages", b"MPUB @T\n" + n(9) + n(2) + sized(b"a") + sized(b"b"),
        b"E_BAD_MESSAGE MPUB failed to read message(1) body size"),
    bad("MPUB size below a message", b"MPUB @T\n" + n(10) + n(1) + sized(b"abc"),
        b"E_BAD_MESSAGE MPUB failed to read message body"),
    bad("MPUB size above its messages", b"MPUB @T\n" + n(13) + n(1) + sized(b"a") + b"NOP\n",
        b"E_BAD_BODY MPUB body is 4 bytes longer than its messages"),
]  # fmt: skip

AUTH_REQUIRED = ("--auth-http-address=127.0.0.1:1",)
WITH_AUTH = [
    bad("AUTH the authority is gone", b"AUTH\n" + sized(b"secret"), b"E_AUTH_FAILED AUTH failed", flags=AUTH_REQUIRED),
    bad("AUTH needed for PUB", b"PUB @T\n" + sized(b"x"), b"E_AUTH_FIRST AUTH required before PUB",
        flags=AUTH_REQUIRED),
    bad("AUTH needed for DPUB", b"DPUB @T 1\n" + sized(b"x"), b"E_AUTH_FIRST AUTH required before DPUB",
        flags=AUTH_REQUIRED),
    bad("AUTH needed for MPUB", mpub(b"x"), b"E_AUTH_FIRST AUTH required before MPUB", flags=AUTH_REQUIRED),
    bad("AUTH needed for SUB", b"SUB @T ch\n", b"E_AUTH_FIRST AUTH required before SUB", flags=AUTH_REQUIRED),
]  # fmt: skip

_LAST = b"THE-END\n"
_LAST_ANSWER = err(b"E_INVALID invalid command THE-END")


class Normaliser:
    """Puts names of this run into the table, and takes out of frames what differs from run to run."""

    def __init__(self) -> None:
        self._topic = f"t-{uuid.uuid4().hex}".encode()
        self.id = b""

    def fill(self, text: bytes) -> bytes:
        return text.replace(b"@T", self._topic).replace(b"@ID", self.id)

    def frame(self, kind: int, data: bytes) -> Frame | None:
        """The frame as the table writes it; None for a heartbeat."""
        if kind == MESSAGE:
            timestamp_ns, attempts, self.id = unpack(">qH16s", data[:26])
            assert timestamp_ns > 1_500_000_000 * 10**9, "a timestamp in nanoseconds since 1970"
            assert re.fullmatch(rb"[0-9a-f]{16}", self.id), "an id of 16 lower-case hex digits"
            return msg(data[26:], attempts)
        if data == b"_heartbeat_":
            return None
        return kind, re.sub(rb'"version":"[^"]*"', b'"version":"*"', data)


def run(transcript: Transcript, address: tuple[str, int], timeout_s: float = 10) -> None:
    """Hold the conversation with a server; AssertionError where it answers anything else."""
    normal = Normaliser()
    with socket.create_connection(address, timeout=timeout_s) as connection:
        got = _frames(connection, normal)
        for i, (sent, frames) in enumerate(transcript.steps):
            connection.sendall(normal.fill(sent))
            if transcript.shut and i == len(transcript.steps) - 1:
                connection.shutdown(socket.SHUT_WR)
            for number, frame in enumerate(frames):
                found = next(got, None)
                wanted = frame[0], normal.fill(frame[1])
                assert found == wanted, f"{transcript.name}, step {i}, frame {number}: {found} instead of {wanted}"
        if not transcript.closes:  # nothing else was sent before this is answered
            connection.sendall(_LAST)
            found = next(got, None)
            assert found == _LAST_ANSWER, f"{transcript.name}: {found} came unasked"
        found = next(got, None)
        assert found is None, f"{transcript.name}: {found} instead of the end"


def _frames(connection: socket.socket, normal: Normaliser) -> Iterator[Frame]:
    with connection.makefile("rb") as reader:
        while head := reader.read(8):
            size, kind = unpack(">ii", head)
            frame = normal.frame(kind, reader.read(size - 4))
            if frame is not None:
                yield frame
