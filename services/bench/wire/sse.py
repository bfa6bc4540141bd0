"""Server-sent events out of bytes, as far as OpenAI's API uses them. Pure: knows no sockets."""

DONE = "[DONE]"


class EventParser:
    """Bytes come in pieces of any size; whole payloads of `data:` come out. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The payloads that this piece completed. Bytes that are not UTF-8 become U+FFFD."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        payloads = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode(errors="replace"))
            elif not line and self._data:
                payloads.append("\n".join(self._data))
                self._data.clear()
        return payloads
