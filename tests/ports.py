"""Ports for servers that tests start."""

import contextlib
import random
import socket


def free_port():
    """One that nothing listens at, below the ports of connections that other tests make."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
