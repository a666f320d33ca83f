"""Tiles of rows: every row belongs to one tile of its group, whatever the sizes."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.pallas import tiling
from jax_ep.pallas.schedule import row_tiles

SIZES = ([6, 6, 6, 6], [0, 0, 0, 0], [0, 64, 0, 1], [1, 127, 128, 129], [3, -5, 7, 2], [1 << 30, 1 << 30, 1 << 30, 1])


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_row_has_one_tile(sizes, tile):
    num_rows = 400
    group, row, start, end, count = (np.asarray(x) for x in row_tiles(jnp.array(sizes, jnp.int32), num_rows, tile))
    assert 0 < count[0] <= len(group) == len(row)
    owner = np.full(num_rows, -1)
    for i in range(count[0]):
        assert row[i] % tiling.ALIGNMENT == 0
        rows = slice(max(row[i], start[i]), min(row[i] + tile, end[i]))
        assert rows.start < rows.stop
        assert (owner[rows] == -1).all()
        owner[rows] = group[i]
    wanted = np.repeat(np.arange(len(sizes)), np.maximum(sizes, 0).clip(max=num_rows))[:num_rows]
    np.testing.assert_array_equal(owner, np.pad(wanted, (0, num_rows - len(wanted)), constant_values=len(sizes)))


def test_list_of_tiles_is_long_enough():
    """The most tiles that sizes can need: every group begins with the last row of a block."""
    num_rows, tile = 1024, 64
    sizes = jnp.array([7] + [64] * 15, jnp.int32)
    tiles = row_tiles(sizes, num_rows, tile)
    assert int(tiles.total[0]) <= tiles.group.shape[0]
    assert int(tiles.total[0]) == 1 + 2 * 15 + 1


def test_tiles_follow_the_shape():
    assert tiling.forward_tiles(32768, 4096, 64).rows == 128
    assert tiling.forward_tiles(512, 4096, 64).rows == 64
    assert tiling.forward_tiles(32768, 4096, 64).columns == 256
    assert tiling.forward_tiles(32768, 128, 64).columns == 128
    assert tiling.forward_tiles(32768, 384, 64).columns == 128  # 256 would compute a third in vain
