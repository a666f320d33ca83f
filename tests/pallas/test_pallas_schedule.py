"""Row tiles: every row belongs to one tile of its group, for all sizes."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.pallas import tiling
from jax_ep.pallas.launch import is_interpreted
from jax_ep.pallas.requirements import fits
from jax_ep.pallas.schedule import row_tiles
from jax_ep.pallas.tiling import ForwardTiles
from jax_ep.xla.grouped_gemm import locate_groups

SIZES = ([6, 6, 6, 6], [0, 0, 0, 0], [0, 64, 0, 1], [1, 127, 128, 129], [3, -5, 7, 2], [1 << 30, 1 << 30, 1 << 30, 1])
MANY_HEIGHTS = ForwardTiles((32, 64, 96, 128, 144, 160, 176, 192, 208, 224, 240, 256))
ALL_TILES = (ForwardTiles(), MANY_HEIGHTS, ForwardTiles((16, 32), band=2), ForwardTiles((32, 48, 64), band=3))


def make(sizes, num_rows, tiles):
    """Return the tiles that exist, and their block_m."""
    made = [np.asarray(x) for x in row_tiles(jnp.array(sizes, jnp.int32), num_rows, tiles, interpret=is_interpreted())]
    assert 0 < made[-1][0] <= len(made[0])
    *made, _ = (x[: made[-1][0]] for x in made)
    return made, np.array(tiles.heights)[made[2]]


@pytest.mark.parametrize("tiles", ALL_TILES, ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, 9, 131], ids=str)
@pytest.mark.slow(unless={"tiles": [ALL_TILES[-1]]})
def test_pallas_schedule_covers_rows(sizes, tiles, rng):
    """Given sizes, or a number of random ones: 131 exceed the threads of a warpgroup."""
    sizes = rng.multinomial(380, rng.dirichlet(np.ones(sizes))) if isinstance(sizes, int) else sizes
    num_rows = 400
    chunk = 64 if tiles == ForwardTiles() else 32  # rows that are stored at once: in 16 bits only, or in float32, too
    (group, row, _, start, end, band, band_size), heights = make(sizes, num_rows, tiles)
    owner = np.full(num_rows, -1)
    for i, height in enumerate(heights):
        assert row[i] % tiling.ALIGNMENT == 0
        assert row[i] >= 0
        rows = slice(max(row[i], start[i]), min(row[i] + height, end[i]))
        assert rows.start < rows.stop
        assert (owner[rows] == -1).all()
        owner[rows] = group[i]
        # Rows of other groups are only in the first and the last chunk.
        assert rows.start - row[i] <= chunk
        assert row[i] + height - rows.stop < (height - 1) % chunk + 1
        assert band[i] <= i < band[i] + band_size[i]
        assert len({*group[band[i] : band[i] + band_size[i]]}) == 1
        assert band_size[i] <= tiles.band
    wanted = np.repeat(np.arange(len(sizes)), np.maximum(sizes, 0).clip(max=num_rows))[:num_rows]
    np.testing.assert_array_equal(owner, np.pad(wanted, (0, num_rows - len(wanted)), constant_values=len(sizes)))


def test_pallas_schedule_block_m_follows_groups():
    """As few tiles as possible, with up to three sharing a block_m; the tallest come first."""
    (group, *_), heights = make([100, 530, 250, 1300, 20], 2200, MANY_HEIGHTS)
    assert [(g, [*heights[group == g]]) for g in dict.fromkeys(group.tolist())] == [
        (2, [256]),
        (3, [224] * 4 + [208] * 2),
        (1, [192] * 3),
        (0, [128]),
        (4, [32]),
    ]


def test_pallas_schedule_tile_list_length():
    """The maximum number of tiles: every group starts with the last row of a block."""
    tiles = ForwardTiles((16, 32))
    made = row_tiles(jnp.array([7] + [32] * 15, jnp.int32), 487, tiles, interpret=is_interpreted())
    assert 1 + 2 * 15 == int(made.total[0]) <= made.group.shape[0]


def test_pallas_schedule_portable_loop():
    assert fits(32768, 512)
    assert not fits(32768, 4096)
    assert not fits(1 << 30, 2)


def test_pallas_schedule_sizes_beyond_int32():
    rows = 1 << 30
    groups = locate_groups(jnp.array([rows, rows, 5], jnp.int32), rows)
    np.testing.assert_array_equal(groups.starts, [0, rows, rows])
    np.testing.assert_array_equal(groups.ends, [rows, rows, rows])
