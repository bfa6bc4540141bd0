"""`baton chat` as somebody at a terminal uses it."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time

from tests.support_cluster import RealCluster

CHAT = [sys.executable, "-m", "services.cli", "chat", "--temperature", "0", "--max-tokens", "16", "--url"]


def test_a_question_by_pipe_and_the_way_it_took(cluster: RealCluster) -> None:
    typed = "What is the capital of France?\n/new\n/exit\n"
    done = subprocess.run([*CHAT, cluster.url], input=typed, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "path remote" in done.stderr


def test_one_question_by_flag_and_a_clear_word_where_nothing_answers(cluster: RealCluster) -> None:
    said = ["--say", "What is the capital of France?"]
    done = subprocess.run([*CHAT, cluster.url, *said], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Paris" in done.stdout) == (0, True), done.stderr
    nobody = subprocess.run(
        [*CHAT, "http://127.0.0.1:9", *said], capture_output=True, text=True, timeout=60, check=False
    )
    assert nobody.returncode == 1
    assert "baton up" in nobody.stderr
    assert "Traceback" not in nobody.stderr


def test_ctrl_c_at_the_prompt_ends_it(cluster: RealCluster) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, whose children would ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ours, theirs = pty.openpty()
    chat = subprocess.Popen([*CHAT, cluster.url], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        shown = b""
        while "›".encode() not in shown:
            shown += os.read(ours, 1024)
        deadline = time.monotonic() + 60
        while chat.poll() is None and time.monotonic() < deadline:
            # Pressed between the prompt and the reading it is lost, and pressed again.
            chat.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                chat.wait(1)
        assert chat.poll() == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(ours)
