"""Tests the encoding and decoding of messages. The tests need no sidecar."""

from __future__ import annotations

import random
import struct
import unittest

from gohvd import _exit, _wire as wire


def _field(number: int, body: bytes) -> bytes:
    return wire.varint(number << 3 | 2) + wire.varint(len(body)) + body


class Encoding(unittest.TestCase):
    def test_varint(self) -> None:
        for n, want in [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02"), ((1 << 64) - 1, "ff" * 9 + "01")]:
            got = wire.varint(n)
            self.assertEqual(got.hex(), want)
            self.assertEqual(wire.take_varint(got, 0, len(got)), (n, len(got)))

    # The text of an exception has surrogates, which cannot be encoded in a message. In the text for the other ranks
    # they are escaped.
    def test_reason(self) -> None:
        try:
            raise ValueError("no file 'x\udcff'")
        except ValueError:
            reason, failed = _exit.of_shutdown()
        self.assertIn(b"ValueError: no file 'x\\udcff'", wire.shutdown(1, reason, failed))

    # The comment above each request is the request in protobuf's text format. The request is encoded as protoc encodes
    # this text.
    def test_requests(self) -> None:
        for got, want in [
            # id: 1 init { settings { key: "A" value: "b" } process_sets { ranks: 0 ranks: 300 } }
            (wire.init(1, {"A": "b"}, [[0, 300]]), "0801" "120f" "0a06" "0a0141" "120162" "1205" "0a03" "00ac02"),
            (wire.shutdown(2), "0802" "1a00"),
            # id: 3 arena { arena: 5 bytes: 67108864 }
            (wire.arena(3, 5, 64 << 20), "0803" "2207" "0805" "1080808020"),
            (wire.drop_arena(4, 5), "0804" "2a02" "0805"),
            (wire.ring(5, 8192), "0805" "3203" "088040"),
            # id: 6 prepare { slot: 0 operation { kind: 6 } }
            (wire.prepare(6, 0, wire.operation(wire.BARRIER)), "0806" "3a04" "1202" "0806"),
            (wire.free(8, 1 << 31, 64), "0808" "4a08" "088080808008" "1040"),
            (wire.add_process_set(9, [2, 1]), "0809" "5204" "0a020201"),
            (wire.add_process_set(9, [2], True, "a"), "0809" "5208" "0a0102" "1801" "220161"),
            (wire.add_process_set(9, [2], timeout=0.5), "0809" "520c" "0a0102" "11000000000000e03f"),
            (wire.remove_process_set(9, 2, 0.5), "0809" "5a0b" "0802" "11000000000000e03f"),
            (wire.remove_process_set(10, 3), "080a" "5a02" "0803"),
            (wire.status(11), "080b" "6200"),
            (wire.bye(12), "080c" "6a00"),
            # id: 13 start_timeline { path: "/t" mark_cycles: true }
            (wire.start_timeline(13, "/t", True), "080d" "7206" "0a022f74" "1001"),
            (wire.stop_timeline(14), "080e" "7a00"),
        ]:
            self.assertEqual(got.hex(), want)

    def test_operation(self) -> None:
        got = wire.operation(
            wire.ALLTOALL, dtype=9, reduce_op=2, prescale=0.5, postscale=2.0, root_rank=1, process_set=4, grouped=True,
            tensors=[((2, 0), (7, 64, 8), (7, 128, 8), 9), ((), None, None, 6), ((), None, None, 0)], splits=[1, 0],
        )  # fmt: skip
        want = (
            "0804" "1809" "2002" "29" + struct.pack("<d", 0.5).hex() + "31" + struct.pack("<d", 2.0).hex()
            + "3801" "4004" "6801"
            # tensors { shape: 2 shape: 0 input { arena: 7 offset: 64 bytes: 8 } output { arena: 7 offset: 128 bytes: 8 } }
            "7215" "0a020200" "1206" "0807" "1040" "1808" "1a07" "0807" "108001" "1808"
            # tensors { dtype: 6 } tensors { }
            "7202" "2006" "7200" "7a020100"
        )  # fmt: skip
        self.assertEqual(got.hex(), want)
        self.assertEqual(wire.operation_name("ü").hex(), "1202c3bc")
        # kind: 15 peer: -1 tag: 300
        message = wire.operation(wire.RECV, peer=wire.ANY_SOURCE, tag=300)
        self.assertEqual(message.hex(), "080f" "8001" + "ff" * 9 + "01" "8801ac02")
        zero = wire.operation(wire.ALLREDUCE, prescale=0.0, postscale=1.0)
        self.assertEqual(zero.hex(), "0801" "29" "0000000000000000", "0 is said, 1 goes without saying")

    def test_frame(self) -> None:
        self.assertEqual(wire.frame(b"x" * 300)[:2].hex(), "ac02")
        for size in (0, wire.MAX_FRAME_BYTES + 1):
            with self.assertRaises(ValueError):
                wire.frame(bytes(size))


class Decoding(unittest.TestCase):
    def decode(self, data: bytes) -> wire.Reply:
        return wire.decode_reply(b"??" + data + b"??", 2, 2 + len(data))

    def test_ready(self) -> None:
        body = b"".join([wire.varint(k << 3) + wire.varint(v) for k, v in enumerate((3, 4, 1, 2, 5, 6, 7), 1)])
        body += _field(8, b"\x08\x01" + _field(2, b"\x00\x03")) + b"\x48\x01"
        r = self.decode(b"\x08\x09" + _field(3, body))
        ready = r.ready
        assert ready is not None
        self.assertEqual(
            (r.id, ready.rank, ready.size, ready.local_rank, ready.local_size, ready.cross_rank, ready.cross_size, ready.epoch),
            (9, 3, 4, 1, 2, 5, 6, 7),
        )
        self.assertEqual((ready.process_sets, ready.homogeneous), ([(1, [0, 3])], True))

    def test_completion(self) -> None:
        place = b"\x08" + wire.varint(1 << 31) + b"\x10\x40\x18\x08"
        body = _field(1, _field(1, place) + _field(2, b"\x02\x01")) + _field(2, b"\x01\x02") + b"\x10\x03" + b"\x18\x05\x20\x06"
        got = self.decode(_field(4, body)).completion
        assert got is not None
        self.assertEqual(got.results, [((1 << 31, 64, 8), (2, 1))])
        self.assertEqual((got.received_splits, got.last_joined, got.source), ([1, 2, 3], 5, 6))
        none = self.decode(_field(4, b"\x18" + wire.varint((1 << 64) - 1))).completion
        assert none is not None
        self.assertEqual(none.last_joined, -1)

    def test_error_and_news(self) -> None:
        error = b"\x08\x04" + _field(2, b"te\xffxt") + _field(3, b"allreduce") + _field(4, b"x") + _field(5, b"\x01\x02")
        e = self.decode(_field(2, error)).error
        assert e is not None
        self.assertEqual((e.kind, e.text, e.operation, e.tensor, e.ranks), (4, "te\ufffdxt", "allreduce", "x", [1, 2]))
        ended = self.decode(_field(8, _field(1, error)))
        self.assertTrue(ended.ended and ended.error is not None and ended.error.ranks == [1, 2])
        self.assertIsNone(self.decode(_field(8, b"")).error)
        self.assertEqual(self.decode(_field(7, b"\x08\x07\x10\x09")).arena, (7, 9))
        self.assertEqual(self.decode(_field(5, b"\x08\x02" + _field(2, b"\x01"))).process_set, (2, [1]))
        status = self.decode(_field(6, _field(1, b"v1") + b"\x10\x05" + _field(3, b"idle") + b"\x20\x01")).status
        assert status is not None
        self.assertEqual((status.version, status.pid, status.state, status.clients), ("v1", 5, "idle", 1))

    def test_what_is_not_known_is_skipped(self) -> None:
        unknown = b"\xa0\x06\x01" + b"\xa1\x06" + bytes(8) + b"\xa5\x06" + bytes(4) + _field(100, b"abc")
        self.assertEqual(self.decode(unknown + b"\x08\x09" + unknown).id, 9)

    def test_garbage(self) -> None:
        bad = [
            b"\x08",  # a message that ends within a field
            b"\x80",
            b"\x08" + b"\xff" * 10 + b"\x01",  # a number of more than ten bytes
            b"\x08" + b"\xff" * 9 + b"\x02",  # a number of more than 64 bits
            b"\x12\x05ab",  # a field that is longer than the message
            b"\x0b",  # a group, which is an obsolete wire type
            _field(4, _field(1, _field(2, wire.varint((1 << 64) - 1)))),  # a negative dimension
            _field(4, _field(2, b"\x80")),
            _field(5, b"\x15" + bytes(4)),  # ranks encoded as 32-bit numbers
        ]
        for data in bad:
            with self.assertRaises(wire.WireError, msg=data.hex()):
                self.decode(data)

    def test_random_bytes(self) -> None:
        whole = b"\x08\x09" + _field(4, _field(1, _field(1, b"\x08\x01") + _field(2, b"\x02\x01")) + _field(2, b"\x01"))
        rnd = random.Random(7)
        refused = 0
        for _ in range(5000):
            data = bytearray(whole)
            for _ in range(rnd.randrange(1, 4)):
                data[rnd.randrange(len(data))] = rnd.randrange(256)
            try:
                self.decode(bytes(data[: rnd.randrange(len(data) + 1)]))
            except wire.WireError:
                refused += 1
        self.assertGreater(refused, 1000)


if __name__ == "__main__":
    unittest.main()
