"""minillm: distributed training and serving of large language models, from scratch, measured on your own machine."""

import time

IMPORTED_AT = time.time()  # `minillm/measure/start.py` splits a process's start here
__version__ = "0.1.0"
