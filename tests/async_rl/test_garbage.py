"""Python's search for cycles leaves what was loaded alone."""

import subprocess
import sys

SCRIPT = """
import gc
from async_rl.process import spare_what_is_loaded
loaded = len(gc.get_objects())
spare_what_is_loaded()
assert gc.get_freeze_count() > loaded // 2, (gc.get_freeze_count(), loaded)
assert len(gc.get_objects()) < loaded // 10
class Node: pass
import weakref
node = Node()
node.itself, gone = node, weakref.ref(node)
del node
gc.collect()
assert gone() is None  # what comes later is still found
"""


def test_what_is_loaded_is_not_searched_and_later_cycles_are_found():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
