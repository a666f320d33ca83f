"""Names of the words that kernels find in the table of a heap and among its control words.

The table, int64, begins with the addresses of the heaps of all D devices. Behind them:

    D + STATUS        address of the status record        D + AREA          offset of the low-latency area
    D + TIMEOUT_NS    how long a wait may take            D + BUFFER_BYTES  size of a low-latency buffer
    D + DEVICE        number of this device              D + TRACE         address of the trace area, or 0

Each heap begins with control words, int32:

    TICKET   next task of the running launch              EPOCHS         [D] launches so far with each device
    EXITED   programs of the launch that ended            EPOCHS + D     [D] the same of low_latency_buffers.py
    FAILED   1 after a failure, until reset               EPOCHS + 2 * D [2, D] int64 greetings
    QUEUE    next task of a launch's second queue
    STARTED  programs of the launch that began
    DONE     [16] counters of finished tasks

heap/symmetric.py allocates both.
"""

import triton.language as tl

STATUS = tl.constexpr(0)
TIMEOUT_NS = tl.constexpr(1)
DEVICE = tl.constexpr(2)
AREA = tl.constexpr(3)
BUFFER_BYTES = tl.constexpr(4)
TRACE = tl.constexpr(5)

TICKET = tl.constexpr(0)
EXITED = tl.constexpr(1)
FAILED = tl.constexpr(2)
QUEUE = tl.constexpr(8)
STARTED = tl.constexpr(9)
DONE = tl.constexpr(16)
EPOCHS = tl.constexpr(64)
