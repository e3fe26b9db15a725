"""The probe of collectives waits for the threads that carry them out."""

import hashlib
import threading

from zero_study.engines.collective_probe import let_other_threads_finish


def test_a_thread_that_still_works_is_waited_for():
    """gloo's threads do so on a busy machine, and what they hold would be counted as memory of the training."""
    thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 30_000))  # releases Python's lock
    thread.start()
    let_other_threads_finish()
    assert not thread.is_alive()
