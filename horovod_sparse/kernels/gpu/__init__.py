"""Selection on a GPU without waiting for it: Triton kernels and the class that launches them. Imports no Horovod.

Importing this module imports neither torch nor Triton. With TRITON_INTERPRET=1 everything runs on the CPU, as in tests.

A bucket is cut into *tiles* of at most BLOCK entries. No tile reaches from one parameter into the next. Tile t holds the
entries from `starts[t]` to `starts[t + 1]`. `tiles.accumulate` reads and writes the residual once. For each tile it stores
sums, and the positions of the tile's *candidates*, which are the entries above a floor. The tile has SLOTS slots for them:
each takes the first index of a run of RUN entries that holds a candidate. The kernels after `threshold.fit` look at those runs
only, with two exceptions. They look at all entries of a group if one of its tiles had more such runs than slots. They look at
all entries of the bucket if the threshold turned out to be below the floor. They run one program per *group* of TILES tiles.
There are few enough groups for every program to add up the counts of all groups. Of a compressor that selects from a part of
the bucket they look at that part.

Magnitudes are compared as integers: the bits of |x| are in the order of |x|. The k-th largest is found digit by digit, from
the most significant one. `search.histogram` counts the next digit over all entries that begin with the digits found so far.
Each round is a launch, which begins by reading the digit off the histogram of the launch before. So no program reads what
another one of the same launch writes. Atomic operations add integers alone. Therefore the same input gives the same bits.
What is decided on the device stays there, in `words` and `numbers`. Launches that turn out not to be needed return at once.

The kernels import the constants of other modules by name: Triton's cache on disk does not notice when a constant changes that
is read as an attribute of a module.
"""
