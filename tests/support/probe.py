"""A small program to run in a network namespace: answers on TCP and UDP, or asks others there.

probe.py serve           answers on TCP and UDP port 7000; says "ready"; ends with its input
probe.py ask ADDRESS S   prints which of tcp and udp answered within S seconds
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable

PORT = 7000
RETRY_S = 0.2


def serve() -> None:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("0.0.0.0", PORT))
    tcp = socket.create_server(("0.0.0.0", PORT))

    def answer_udp() -> None:
        while True:
            _, source = udp.recvfrom(64)
            # The asker as this host sees it: behind a NAT that is the router.
            udp.sendto(source[0].encode(), source)

    def answer_tcp() -> None:
        while True:
            caller, source = tcp.accept()
            caller.sendall(source[0].encode())
            caller.close()

    for target in (answer_udp, answer_tcp):
        threading.Thread(target=target, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


def ask(address: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    print(f"tcp {_retried(_ask_tcp, address, deadline)}")
    print(f"udp {_retried(_ask_udp, address, deadline + within_s)}")


def _retried(question: Callable[[str], str], address: str, deadline: float) -> str:
    while True:
        try:
            return question(address)
        except OSError:
            if time.monotonic() > deadline:
                return "-"
            time.sleep(RETRY_S / 10)


def _ask_tcp(address: str) -> str:
    with socket.create_connection((address, PORT), RETRY_S) as connection:
        return connection.recv(64).decode()


def _ask_udp(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(RETRY_S)
        asking.connect((address, PORT))
        asking.send(b"who")
        return asking.recv(64).decode()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        ask(sys.argv[2], float(sys.argv[3]))
