"""Dies of an illegal instruction while it is imported, like a build for a newer processor."""
import os
import signal

os.kill(os.getpid(), signal.SIGILL)
