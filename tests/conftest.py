"""Fixtures for every test: `tiny` (tiny random models) and `starter_folder` (the starter model)
and `start` (an engine in this process).

No test sees this machine's Hugging Face cache or login, and none reaches the real Hub: an address that
refuses stands for it until a test names its own.
"""

import os
import signal

from hypothesis import HealthCheck, settings

# A shell starts its background jobs with SIGINT ignored, and so would everything that the tests start be.
signal.signal(signal.SIGINT, signal.default_int_handler)

NO_HUB = {
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HF_HOME": "/nonexistent/huggingface",
}
for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_", "HUGGING_FACE_"))]:
    del os.environ[name]
os.environ |= NO_HUB

# Two servers whose BLAS has a thread per core each wait for each other in loops: 99 s where this takes 71.
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# How long an example takes, or making one up, is a matter of what else the machine does.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

pytest_plugins = ["tests.tools.tiny_fixture", "tests.tools.starter_fixture", "tests.tools.engine_fixture"]
