"""`health.py PORT [PATH]`: exit status 0 where http://127.0.0.1:PORT/health answers 200. Imports next to nothing: it
runs every few seconds in every container."""

import socket
import sys

port, path = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "/health"
with socket.create_connection(("127.0.0.1", port), timeout=4) as connection:
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    answer = b""
    while chunk := connection.recv(4096):
        answer += chunk
print(answer.decode(errors="replace").rpartition("\r\n\r\n")[2])
sys.exit(answer.split(b" ", 2)[1:2] != [b"200"])
