"""Our decoder of header blocks against the `hpack` library as oracle, and what it refuses."""

import random

import pytest
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError
from hpack.huffman_table import decode_huffman as library_decode
from hpack.table import HeaderTable
from proxy.lean.peer import decoded, request_headers

from popmq.proxy.transport.interface import GrpcStatus
from popmq.proxy.transport.lean import replies
from popmq.proxy.transport.lean.frames import ConnectionFault, ErrorCode, Http2FrameReader
from popmq.proxy.transport.lean.headers import (
    CHANGING_NAMES,
    KEPT_HEADS,
    LAZY_NAMES,
    HeaderBlock,
    HeaderDecoder,
    Malformed,
    RequestHead,
    RequestShape,
)
from popmq.proxy.transport.lean.huffman import decode_huffman
from popmq.proxy.transport.lean.metadata import HuffmanCoded

MAX = 32 << 10
# The shapes of RFC 7541, appendix C: the fields of its three requests and three responses.
C_REQUESTS = [
    [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")],
    [
        (":method", "GET"),
        (":scheme", "http"),
        (":path", "/"),
        (":authority", "www.example.com"),
        ("cache-control", "no-cache"),
    ],
    [
        (":method", "GET"),
        (":scheme", "https"),
        (":path", "/index.html"),
        (":authority", "www.example.com"),
        ("custom-key", "custom-value"),
    ],
]


def plain(decoder: HeaderDecoder, block: bytes) -> list[tuple[bytes, bytes]]:
    fields, _ = decoder.fields(block)
    assert not any(type(value) is HuffmanCoded for _, value in fields)
    return [(name.encode(), value) for name, value in fields]


@pytest.mark.parametrize("huffman", [False, True])
@pytest.mark.parametrize("table", [4096, 256, 0])
def test_the_requests_of_the_rfc_are_decoded_as_the_library_does(huffman: bool, table: int) -> None:
    encoder, oracle, ours = Encoder(), Decoder(), HeaderDecoder(MAX)
    encoder.header_table_size = table
    for fields in C_REQUESTS * 3:
        block = encoder.encode(fields, huffman=huffman)
        assert plain(ours, block) == list(oracle.decode(block, raw=True))


@pytest.mark.parametrize("seed", range(20))
def test_random_fields_over_one_connection_are_decoded_as_the_library_does(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    encoder, oracle, ours = Encoder(), Decoder(), HeaderDecoder(1 << 20)
    names = [name.decode() for name, _ in HeaderTable.STATIC_TABLE if name != b"transfer-encoding"]
    names += [f"x-{number}" for number in range(30)]
    for _ in range(60):
        if chance.random() < 0.1:
            encoder.header_table_size = chance.choice([0, 100, 1000, 4096])
        fields = [
            (
                chance.choice(names),
                "".join(chance.choices("abcXYZ019-/:~", k=chance.choice([0, 3, 40, 130, 300]))),
                chance.random() < 0.3,
            )
            for _ in range(chance.randint(0, 12))
        ]
        block = encoder.encode(fields, huffman=chance.random() < 0.5)
        assert plain(ours, block) == list(oracle.decode(block, raw=True))


def test_a_block_that_left_the_table_alone_is_decoded_once_until_the_table_changes() -> None:
    encoder, ours = Encoder(), HeaderDecoder(MAX)
    ours.request(encoder.encode(request_headers("/s/one")))
    block = encoder.encode(request_headers("/s/one"))
    first = ours.request(block)
    assert ours.request(block) is first
    changing = encoder.encode([*request_headers("/s/one"), ("x-new", "value")])
    assert ours.request(changing).metadata["x-new"] == "value"
    # The same bytes mean other entries now: x-new pushed them one place on.
    with pytest.raises(Malformed):
        ours.request(block)
    assert ours.request(encoder.encode(request_headers("/s/one"))).shape.path == "/s/one"


def test_the_kept_results_of_a_connection_are_bounded() -> None:
    ours = HeaderDecoder(MAX)
    start = Encoder().encode([(n, v, True) for n, v in request_headers("/s/one")], huffman=False)
    for number in range(3 * KEPT_HEADS):
        ours.request(start + replies._literal("x-number", str(number)))
    assert len(ours._heads) <= KEPT_HEADS
    assert len(ours._shapes) <= KEPT_HEADS


def test_a_value_that_changes_with_every_call_is_decoded_when_it_is_asked_for() -> None:
    ours = HeaderDecoder(MAX)
    coder = Encoder().huffman_coder
    value = coder.encode(b"4711-4712")
    field = b"\0" + bytes((15,)) + b"x-mq-request-id" + bytes((0x80 | len(value),)) + value
    start = Encoder().encode([(n, v, True) for n, v in request_headers("/s/one")], huffman=False)
    head = ours.request(start + field)
    assert type(head.metadata._fields["x-mq-request-id"]) is HuffmanCoded
    assert head.metadata.get("x-mq-request-id") == "4711-4712"
    assert head.metadata["x-mq-request-id"] == "4711-4712"


VALUES = [
    "2026-11-29",
    "0ce0c3f2-42b8-45d1-941e-a39bdaadcb2c",
    "3000m",
    "two words",
    " a blank before",
    "a tab behind\t",
    "a break\nwithin",
    "ä",
    "",
    "x" * 130,
]


@pytest.mark.parametrize("seed", range(20))
def test_calls_that_differ_in_a_few_values_are_decoded_as_the_library_does(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    encoder, oracle, ours = Encoder(), Decoder(), HeaderDecoder(1 << 20)
    names = sorted(CHANGING_NAMES)
    for _ in range(100):
        changing = [
            (name, chance.choice(VALUES), chance.random() < 0.8)
            for name in chance.sample(names, chance.randint(0, 3))
        ]
        path = chance.choice(["/s/one", "/s/two"])
        fixed = [(name, value, False) for name, value in request_headers(path)]
        block = encoder.encode([*fixed, *changing], huffman=chance.random() < 0.3)
        decoded_fields = oracle.decode(block, raw=True)
        if any(is_forbidden(value) and not kept for _, value, kept in changing):
            return  # it would go into the table, which ends the connection
        try:
            head = ours.request(block)
        except Malformed:
            assert any(is_forbidden(value) for _, value, _ in changing)
            continue
        expected = {name.decode(): value.decode("latin-1") for name, value in decoded_fields}
        assert head.shape.path == path
        assert head.timeout.decode("latin-1") == expected.get("grpc-timeout", "")
        seen = {name: head.metadata[name] for name in head.metadata}
        assert seen == {name: expected[name] for name in seen}
        assert {name for name, _, _ in changing} - {"grpc-timeout"} <= seen.keys()
        assert not any(is_forbidden(expected[name]) for name in seen if name not in LAZY_NAMES)


def is_forbidden(value: str) -> bool:
    return value.strip(" \t") != value or "\n" in value


def test_calls_of_one_client_share_all_but_the_values_that_change() -> None:
    ours = HeaderDecoder(MAX)
    encoder = Encoder()
    heads = []
    for number in range(4):
        for name in ("x-mq-request-id", "grpc-timeout"):  # in the table, as Java and Node have them
            fields = [*request_headers("/s/one"), (name, f"{number}S")]
            heads.append((name, number, ours.request(encoder.encode(fields))))
    shapes = {head.shape for _, _, head in heads}
    assert len(shapes) == 2
    for name, number, head in heads:
        if name == "grpc-timeout":
            assert (head.timeout_ms(), head.metadata.get("x-mq-request-id")) == (number * 1000, "")
        else:
            assert (head.timeout_ms(), head.metadata.get("x-mq-request-id")) == (None, f"{number}S")


@pytest.mark.parametrize("huffman", [False, True])
def test_a_broken_value_in_the_place_of_one_that_changes_is_found(huffman: bool) -> None:
    ours, encoder = HeaderDecoder(MAX), Encoder()
    ours.request(encoder.encode(request_headers("/s/one")))

    def block(timeout: str) -> bytes:
        fixed = [(name, value, False) for name, value in request_headers("/s/one")]
        return encoder.encode([*fixed, ("grpc-timeout", timeout, True)], huffman=huffman)

    assert ours.request(block("2999u")).timeout_ms() == 2
    assert ours.request(block("2000u")).timeout_ms() == 2
    good = block("3999u")
    assert ours.request(good).timeout_ms() == 3
    broken = good[:-4] + b"\xff" * 4
    if huffman:
        with pytest.raises(ConnectionFault) as caught:
            ours.request(broken)
        assert caught.value.code is ErrorCode.COMPRESSION_ERROR
    else:
        with pytest.raises(Malformed):
            ours.request(broken).timeout_ms()
        with pytest.raises(Malformed):
            ours.request(block("200 \t"))


@pytest.mark.parametrize("seed", range(20))
def test_huffman_codes_are_decoded_as_the_library_does(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    coder = Encoder().huffman_coder
    for _ in range(200):
        text = chance.randbytes(chance.choice([0, 1, 5, 40]))
        coded = coder.encode(text)
        assert decode_huffman(coded) == text
        damaged = bytes(byte ^ (chance.random() < 0.1) << chance.randrange(8) for byte in coded)
        damaged = damaged[: chance.randint(0, len(damaged))]
        try:
            expected: bytes | None = bytes(library_decode(damaged))
        except HPACKError:
            expected = None
        try:
            decoded_text: bytes | None = decode_huffman(damaged)
        except HPACKError:
            decoded_text = None
        assert decoded_text == expected


def test_a_wrong_code_in_such_a_value_is_an_empty_value() -> None:
    ours = HeaderDecoder(MAX)
    start = Encoder().encode([(n, v, True) for n, v in request_headers("/s/one")], huffman=False)
    head = ours.request(start + b"\0\x0fx-mq-request-id\x84\xff\xff\xff\xff")
    assert head.metadata.get("x-mq-request-id") == ""


def test_metadata_holds_what_handlers_may_see_and_nothing_of_the_transport() -> None:
    extra = [("grpc-timeout", "3S"), ("blob-bin", "/wE"), ("x-mq-namespace", "")]
    head = HeaderDecoder(MAX).request(Encoder().encode([*request_headers("/s/one"), *extra]))
    assert dict(head.metadata) == {
        "x-mq-client-id": "me@1",
        "blob-bin": "\xff\x01",
        "x-mq-namespace": "",
    }
    assert len(head.metadata) == 3
    assert head.metadata.get("te", "none") == "none"


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # index 0
        b"\xbe",  # an index behind the table
        b"\xff\xff\xff\xff\xff\xff\x7f",  # an integer without an end
        b"\x7f",  # an integer that is cut off
        b"\x40\x05ab",  # a name that is cut off
        b"\x00\x01a\x7f\xff\xff\xff\x7f",  # a value longer than the block
        b"\x00\x01a\x05b",  # a value that is cut off
        b"\x00\x01a\x81\x00",  # padding of zeros
        b"\x00\x01a\x84\xff\xff\xff\xff",  # the end symbol
        b"\x82\x20",  # a size update behind a field
        b"\x3f\xe2\x1f",  # a table larger than we allowed
        b"\x20\x20\x20\x82",  # more updates than can be needed
    ],
)
def test_a_block_that_cannot_be_decoded_ends_the_connection(block: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        HeaderDecoder(MAX).request(block)
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR


def test_a_few_bytes_that_stand_for_many_end_the_connection() -> None:
    encoder, ours = Encoder(), HeaderDecoder(MAX)
    ours.fields(encoder.encode([("x-bomb", "b" * 3_000)]))
    with pytest.raises(ConnectionFault) as caught:
        ours.request(b"\xbe" * 1_000)
    assert (caught.value.code, caught.value.bound) == (
        ErrorCode.ENHANCE_YOUR_CALM,
        "header_bytes",
    )


def test_a_coded_value_counts_for_the_longest_that_it_can_stand_for() -> None:
    block = b"\0\x0fx-mq-request-id\xff" + bytes((0xD1, 0x0E)) + b"\x18" * 2_000
    with pytest.raises(ConnectionFault) as caught:
        HeaderDecoder(3_000).request(block)
    assert caught.value.bound == "header_bytes"


@pytest.mark.parametrize(
    "fields",
    [
        [(":method", "POST"), (":scheme", "http")],
        [(":method", "POST"), (":scheme", "http"), (":path", "")],
        [(":method", "POST"), (":path", "/"), (":authority", "x")],
        [*request_headers("/"), (":method", "POST")],
        [*request_headers("/")[:4], (":method", "POST")],
        [*request_headers("/")[:3], ("te", "trailers"), (":authority", "x")],
        [*request_headers("/")[:4], (":status", "200")],
        [*request_headers("/")[:4], (":protocol", "websocket")],
        [*request_headers("/"), ("connection", "close", True)],
        [*request_headers("/"), ("transfer-encoding", "chunked", True)],
        [*request_headers("/")[:4], ("te", "gzip")],
        [*request_headers("/"), ("Upper", "case", True)],
        [*request_headers("/"), ("a b", "c", True)],
        [*request_headers("/"), ("a", "b\r\nc", True)],
        [*request_headers("/"), ("a", " b", True)],
        [*request_headers("/"), ("content-length", "-1")],
    ],
)
def test_fields_that_make_no_request_are_the_fault_of_one_stream(
    fields: list[tuple[str, str]],
) -> None:
    with pytest.raises(Malformed):
        HeaderDecoder(MAX).request(Encoder().encode(fields, huffman=False))


def test_a_forbidden_field_for_the_table_ends_the_connection() -> None:
    block = Encoder().encode([*request_headers("/"), ("a", "b\0c")], huffman=False)
    with pytest.raises(ConnectionFault) as caught:
        HeaderDecoder(MAX).request(block)
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR


def test_trailers_may_hold_no_pseudo_header() -> None:
    ours = HeaderDecoder(MAX)
    ours.trailers(Encoder().encode([("x-checksum", "1")]))
    with pytest.raises(Malformed):
        ours.trailers(Encoder().encode([(":path", "/")]))


@pytest.mark.parametrize(
    ("text", "wanted_ms"),
    [
        ("", None),
        ("2H", 7_200_000),
        ("3M", 180_000),
        ("5S", 5_000),
        ("1500m", 1_500),
        ("2500u", 2),
        ("99999999n", 99),
        ("0n", 0),
        ("1892159940S", None),
        ("31535999M", 31_535_999 * 60_000),
    ],
)
def test_a_deadline_is_read_in_each_unit(text: str, wanted_ms: int | None) -> None:
    head = head_with(text)
    if text == "1892159940S":  # more digits than the protocol has; clients use a larger unit
        with pytest.raises(Malformed):
            head.timeout_ms()
    else:
        assert head.timeout_ms() == wanted_ms


@pytest.mark.parametrize("text", ["5", "S", "-5S", "5s", "1.5S", "٣S"])
def test_what_is_no_deadline_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        head_with(text).timeout_ms()


def head_with(timeout: str) -> RequestHead:
    shape = RequestShape([(":method", b"POST"), (":scheme", b"http"), (":path", b"/")])
    return RequestHead(shape, {"grpc-timeout": timeout.encode()})


def fill(block: HeaderBlock, part: bytes) -> None:
    for _ in range(100):
        block.add(part)


def test_a_header_block_in_too_many_frames_or_bytes_is_cut_off() -> None:
    for size, name in ((0, "header_frames"), (2_000, "header_bytes")):
        block = HeaderBlock(MAX)
        block.open(1, False, b"")
        with pytest.raises(ConnectionFault) as caught:
            fill(block, b"x" * size)
        assert caught.value.bound == name


def test_what_is_answered_is_decoded_by_the_library() -> None:
    decoder = Decoder()
    detail = "größer als 100 %\n"
    answer = replies.unary_start(7, 3) + b"abc" + replies.unary_end(7)
    answer += replies.trailers(9, GrpcStatus.INTERNAL, detail)
    head, data, trailers, failed = Http2FrameReader(1000).feed(answer)
    assert [head[:3] for head in (head, data, trailers, failed)] == [
        (1, 4, 7),
        (0, 0, 7),
        (1, 5, 7),
        (1, 5, 9),
    ]
    assert decoded(decoder, head[3]) == {":status": "200", "content-type": "application/grpc"}
    assert data[3] == b"\0\0\0\0\3abc"
    assert decoded(decoder, trailers[3]) == {"grpc-status": "0"}
    assert decoded(decoder, failed[3]) == {
        "grpc-status": "13",
        "grpc-message": "gr%C3%B6%C3%9Fer als 100 %25%0A",
    }


def test_a_long_detail_is_decoded_by_the_library() -> None:
    (frame,) = Http2FrameReader(10_000).feed(replies.trailers(1, GrpcStatus.INTERNAL, "x" * 500))
    assert decoded(Decoder(), frame[3])["grpc-message"] == "x" * 500


def test_a_detail_is_cut_to_what_clients_take() -> None:
    assert len(replies.percent_encoded("é" * 100_000)) <= 6 * replies.MAX_DETAIL
    assert replies.percent_encoded("\ud800") == "?"
