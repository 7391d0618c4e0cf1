"""`python traffic.py SENDERS BYTES TARGET...`: sends BYTES to every target, and takes what so many others send.

Prints the bytes and seconds of what it received, from the first byte to the last, and leaves.
"""

import socket
import sys
import threading
import time

PORT = 29600
_CHUNK = 1 << 16


def receive(listener: socket.socket, senders: int) -> tuple[int, float]:
    connections = [listener.accept()[0] for _ in range(senders)]
    totals: list[int] = []
    began = time.monotonic()

    def take(connection: socket.socket) -> None:
        total = 0
        while got := len(connection.recv(_CHUNK)):
            total += got
        totals.append(total)

    threads = [threading.Thread(target=take, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(totals), time.monotonic() - began


def send(target: str, size: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((target, PORT), timeout=30)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end, f"{target} does not listen"
            time.sleep(0.01)
    with connection:
        for _ in range(size // _CHUNK):
            connection.sendall(bytes(_CHUNK))


def main() -> None:
    senders, size, targets = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    with socket.create_server((socket.gethostname(), PORT)) as listener:
        sending = [threading.Thread(target=send, args=(target, size)) for target in targets]
        for thread in sending:
            thread.start()
        received, seconds = receive(listener, senders) if senders else (0, 0.0)
        for thread in sending:
            thread.join()
    print(received, seconds)


if __name__ == "__main__":
    main()
