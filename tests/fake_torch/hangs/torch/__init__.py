"""Never finishes its import."""
import time

time.sleep(3600)
