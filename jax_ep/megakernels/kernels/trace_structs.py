"""Layout of a trace area, for the kernels that write it and the tools that read it, in int64 words.

The area begins with NUM_HEADER words; AREA_LAUNCHES and the following constants name the first ones. Each program then
has its own region: the number of its events, and from word NUM_HEADER on the events that fit, NUM_WORDS each:

    begin, end                      ns of the device's clock
    task | kind << 32 | multiprocessor << 40 | (device of the peer + 1) << 52
    block | epoch << 32             block that was sent or awaited; for a member, its epoch
    launch_id | number << 32        `Heap.launch_id`, and the number of launches traced before

At its end a launch records an event "member" for each rank of its group: the task is rank | num_ranks << 16, the peer
the rank's device, the block the number of programs. These events match the launches of several devices.

This module imports neither JAX nor Triton.
"""

NUM_HEADER, NUM_WORDS = 16, 5
AREA_LAUNCHES, AREA_ROOM, AREA_PROGRAMS, AREA_LOST = range(4)
"""Words of the header: traced launches, events per region, regions, and events of programs without a region."""

KINDS = ("member", "announce", "count", "place", "push", "publish", "wait", "copy", "tile", "sum", "zero")
"""Kinds of events, by number."""

READY, OWN = -1, -2
"""Values in place of a block: a wait for ready handshakes, and a wait for tasks of this launch on the same device."""
