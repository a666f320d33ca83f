"""What a trace area holds, for the kernels that write it and for whoever reads it: int64 words.

The area begins with NUM_HEADER words, of which AREA_LAUNCHES and the following name the first. Then each program has
its own region, where it alone writes: the number of events that it had, and, NUM_HEADER words from its start on, the
events, as far as there is room, NUM_WORDS each:

    when it began, when it ended    ns of the device's clock
    task | kind << 32 | multiprocessor << 40 | (device of the peer + 1) << 52
    block | epoch << 32             of the block that was pushed or waited for; the epoch of a member
    launch | number << 32           `Heap.LAUNCH`, and how many launches were traced before it

At its end a launch has an event "member" for each rank of its group, of which the task is the rank | (number of ranks)
<< 16, the peer its device, and the block the number of programs. By these launches of several devices find each other.

This module imports neither JAX nor Triton.
"""

NUM_HEADER, NUM_WORDS = 16, 5
AREA_LAUNCHES, AREA_ROOM, AREA_PROGRAMS, AREA_LOST = range(4)
"""Words of the header: launches so far, events of a region, regions, and events of programs without a region."""

KINDS = ("member", "announce", "count", "place", "push", "publish", "wait", "copy", "tile", "sum", "zero")
"""What a program can be at, by number."""

GREETING, OWN = -1, -2
"""In place of a block: a wait for greetings, and one for tasks of this launch on the same device."""
