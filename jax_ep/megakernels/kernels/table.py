"""Words of a heap's table and of its control area.

The table is int64. It begins with the heap addresses of all `num_devices` devices; the words below follow them. Each
heap begins with int32 control words. `jax_ep/heap` allocates both.
"""

import triton.language as tl

# Words of the table, from index num_devices on.
STATUS = tl.constexpr(0)  # address of the status record
TIMEOUT_NS = tl.constexpr(1)  # how long a wait may take
DEVICE = tl.constexpr(2)  # number of this device
AREA = tl.constexpr(3)  # offset of the low-latency area in a heap
BUFFER_BYTES = tl.constexpr(4)  # size of a low-latency buffer
TRACE = tl.constexpr(5)  # address of the trace area; 0: nothing is recorded

# Control words of the running launch.
TICKET = tl.constexpr(0)  # next task
EXITED = tl.constexpr(1)  # programs that have ended
FAILED = tl.constexpr(2)  # 1 after a failure, until the heap is reset
QUEUE = tl.constexpr(8)  # next task of the second queue
STARTED = tl.constexpr(9)  # programs that have started
DONE = tl.constexpr(16)  # [16] counters of finished tasks

# Control words that outlive a launch.
#   EPOCHS                    [num_devices] int32: launches with each device
#   EPOCHS + num_devices      [num_devices] int32: launches with each device that use the low-latency area
#   EPOCHS + 2 * num_devices  [2, num_devices] int64: ready handshakes, by parity of the epoch
EPOCHS = tl.constexpr(64)
