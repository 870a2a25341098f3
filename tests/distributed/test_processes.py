"""X6: the forks of a killed process exit with it."""

import subprocess
import sys

from tests.processes import alive, descendants, wait_for

PARENT = """
import multiprocessing, time
from megastep.distributed.processes import forks_end_with_us
forks_end_with_us()
multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,)).start()
time.sleep(300)
"""


def test_a_fork_exits_with_its_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT])
    try:
        children = wait_for(lambda: descendants(parent.pid), 30)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not alive(children), 10)
