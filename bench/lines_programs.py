"""The two ends of what the lines bench measures. The far one is a program, which prints where it listens.

A stream begins with ECHO, and every byte comes back; or with SINK and a size, and one byte comes back when
all has arrived. Datagrams carry whether an answer is wanted: it has the number of those that came.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time

ECHO, SINK = b"E", b"S"
DATAGRAM_BYTES = 1200
"""As large as QUIC's first ones."""
_WANTED, _AGAIN = b"w", b"-"
_WINDOW = 256
_ANSWERED = 64
"""An answer to each so many."""
_LOST_S = 0.2
_CHUNK_BYTES = 1 << 18
_BUFFER_BYTES = 4 << 20
_WAIT_S = 30.0

Address = tuple[str, int] | str


# -- the far end -------------------------------------------------------------------------------------


def main() -> None:
    path = sys.argv[1]
    tcp = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(path)
    unix.listen()
    udp = datagram_socket()
    udp.bind(("127.0.0.1", 0))
    for work, end in ((_accept, tcp), (_accept, unix), (_count, udp)):
        threading.Thread(target=work, args=(end,), daemon=True).start()
    print(json.dumps({"tcp": tcp.getsockname(), "unix": path, "udp": udp.getsockname()}), flush=True)
    sys.stdin.read()


def _accept(listener: socket.socket) -> None:
    while True:
        end, _ = listener.accept()
        with end:
            _tune(end)
            _serve(end)


def _serve(end: socket.socket) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    if end.recv(1) == ECHO:
        while count := end.recv_into(buffer):
            end.sendall(memoryview(buffer)[:count])
        return
    (left,) = struct.unpack("!Q", end.recv(8, socket.MSG_WAITALL))
    while left and (count := end.recv_into(buffer, min(left, len(buffer)))):
        left -= count
    end.sendall(b"!")


def _count(end: socket.socket) -> None:
    buffer = bytearray(DATAGRAM_BYTES)
    count = 0
    while True:
        _, sender = end.recvfrom_into(buffer)
        count += 1
        if buffer[:1] == _WANTED:
            end.sendto(struct.pack("!Q", count), sender)


# -- the near end ------------------------------------------------------------------------------------


def round_trips(address: Address, rounds: int, size_bytes: int) -> list[float]:
    """Seconds of each."""
    message, seconds = bytes(size_bytes), []
    with _connected(address) as end:
        end.sendall(ECHO)
        for _ in range(rounds):
            start = time.perf_counter()
            end.sendall(message)
            end.recv(size_bytes, socket.MSG_WAITALL)
            seconds.append(time.perf_counter() - start)
    return seconds


def stream_rate(address: Address, size_bytes: int) -> float:
    """Bytes a second."""
    chunk = bytes(_CHUNK_BYTES)
    with _connected(address) as end:
        end.sendall(SINK + struct.pack("!Q", size_bytes))
        start = time.perf_counter()
        for _ in range(size_bytes // _CHUNK_BYTES):
            end.sendall(chunk)
        end.recv(1)
        return size_bytes / (time.perf_counter() - start)


def datagram_rate(address: Address, seconds: float) -> float:
    """Datagrams a second that arrived, with a bounded number on their way at once."""
    plain, wanted = (mark + bytes(DATAGRAM_BYTES - 1) for mark in (_AGAIN, _WANTED))
    with datagram_socket() as end:
        end.connect(address)
        end.settimeout(_LOST_S)
        end.send(wanted)
        first = answered = _answer(end)
        sent = first
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            for _ in range(_ANSWERED - 1):
                end.send(plain)
            end.send(wanted)
            sent += _ANSWERED
            while sent - answered > _WINDOW:
                try:
                    answered = _answer(end)
                except TimeoutError:
                    # As many as nobody has heard of are gone; the next answer tells how many came.
                    end.send(wanted)
                    sent = answered = _answer(end)
        took_s = time.perf_counter() - start
        return (answered - first) / took_s


def _answer(end: socket.socket) -> int:
    count: int = struct.unpack("!Q", end.recv(8))[0]
    return count


def _connected(address: Address) -> socket.socket:
    end = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    end.settimeout(_WAIT_S)
    end.connect(address)
    _tune(end)
    return end


def _tune(end: socket.socket) -> None:
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def datagram_socket() -> socket.socket:
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return end


if __name__ == "__main__":
    main()
