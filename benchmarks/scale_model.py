"""Model of flat and hierarchical all-to-alls: bytes over links and between nodes, and times that follow.

A row is a token on its way to a rank. Flat, a token goes once to each rank with one of its experts. Hierarchically it
goes once to each other node with one of them, to the GPU at the same position there. That GPU sends it once to each
rank of its node with one of the token's experts. Inside its own node a token goes directly. Combine takes the same ways
back, and sums before it crosses, so it has as many rows.

Tokens of all GPUs have the same routing statistics. So the rows that a GPU sends and receives follow from the shares of
tokens that have an expert on a rank, and on a node. These are in closed form if all experts are equally popular, and
from sampled tokens otherwise. With more ranks than experts there are copies of all experts, each on whole nodes, and a
token takes one of these, as in `jax_ep.placement`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

WAYS = ("flat", "hierarchical")


class Topology(NamedTuple):
    """Ranks in consecutive nodes, and slots for experts in consecutive ranks.

    Attributes:
      num_ranks: W, a multiple of `gpus_per_node`.
      gpus_per_node: ranks that reach each other by links.
      num_experts: E; W divides it, or it divides W and `gpus_per_node` divides it.
    """

    num_ranks: int
    gpus_per_node: int
    num_experts: int

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.gpus_per_node

    @property
    def num_slots(self) -> int:
        return max(self.num_experts, self.num_ranks)

    @property
    def copies(self) -> int:
        """Number of copies of each expert; slot s holds expert `s % E`."""
        return self.num_slots // self.num_experts


class Rates(NamedTuple):
    """Rates at which a GPU sends, and at the same time receives.

    Attributes:
      link: bytes per second inside a node.
      nic: bytes per second between nodes; GPUs that share a NIC share its rate.
      start: seconds of a launch; the hierarchical way has two launches.
      message: seconds of the NIC per peer that receives.
      blocks: number of blocks in which the hierarchical way overlaps its two legs.
    """

    link: float
    nic: float
    start: float = 20e-6
    message: float = 1e-6
    blocks: int = 4


class Rows(NamedTuple):
    """`[W]` rows that each GPU sends and receives: between nodes, and inside its node."""

    nic_sent: np.ndarray
    nic_received: np.ndarray
    link_sent: np.ndarray
    link_received: np.ndarray

    @property
    def nic(self) -> float:
        """Rows of the busiest GPU between nodes, in the busier direction."""
        return float(max(self.nic_sent.max(), self.nic_received.max()))

    @property
    def link(self) -> float:
        """Rows of the busiest GPU inside a node, in the busier direction."""
        return float(max(self.link_sent.max(), self.link_received.max()))


def uniform_shares(topology: Topology, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `[W]` and `[N]` probabilities that a token of uniform routing has an expert on a rank, and on a node."""

    def share(slots: int) -> float:
        missed = math.comb(topology.num_experts - slots, top_k) / math.comb(topology.num_experts, top_k)
        return (1 - missed) / topology.copies

    per_rank = topology.num_slots // topology.num_ranks
    ranks = np.full(topology.num_ranks, share(per_rank))
    return ranks, np.full(topology.num_nodes, share(per_rank * topology.gpus_per_node))


def spread(ids: np.ndarray, topology: Topology, rng: np.random.Generator) -> np.ndarray:
    """Map the experts `[M, K]` of tokens to slots; each token takes a random copy of all experts."""
    return ids + topology.num_experts * rng.integers(0, topology.copies, (len(ids), 1))


def sampled_shares(slots: np.ndarray, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Return `[W]` and `[N]` shares of the tokens `[M, K]`, ids of slots, with one on a rank, and on a node."""
    on_rank = _on_ranks(slots, topology)
    on_node = on_rank.reshape(len(slots), topology.num_nodes, -1).any(axis=-1)
    return on_rank.mean(axis=0), on_node.mean(axis=0)


def expected(rank_shares: np.ndarray, node_shares: np.ndarray, topology: Topology) -> dict[str, Rows]:
    """Return the rows for each token of a GPU, `{way: Rows}`, if the tokens of all GPUs have these shares."""
    gpus, nodes = topology.gpus_per_node, topology.num_nodes
    by_node = rank_shares.reshape(nodes, gpus)
    near = np.repeat(by_node.sum(axis=1), gpus) - rank_shares  # the other ranks of the own node
    away = rank_shares.sum() - near - rank_shares
    flat = Rows(away, (topology.num_ranks - gpus) * rank_shares, near, (gpus - 1) * rank_shares)
    landing = np.repeat(node_shares, gpus)
    crossing = Rows(node_shares.sum() - landing, (nodes - 1) * landing, nodes * near, nodes * (gpus - 1) * rank_shares)
    return dict(zip(WAYS, (flat, crossing), strict=True))


def counted(slots: np.ndarray, topology: Topology) -> dict[str, Rows]:
    """Count the rows of a routing `[W, T, K]`, ids of slots or -1: `{way: Rows}`."""
    ranks, gpus, nodes = topology.num_ranks, topology.gpus_per_node, topology.num_nodes
    hits, crossings = np.zeros((ranks, ranks), np.int64), np.zeros((ranks, nodes), np.int64)
    for source, tokens in enumerate(slots):
        on_rank = _on_ranks(tokens, topology)
        hits[source] = on_rank.sum(axis=0)
        crossings[source] = on_rank.reshape(len(tokens), nodes, gpus).any(axis=-1).sum(axis=0)
    node = np.arange(ranks) // gpus
    inside = node[:, None] == node
    pairs = hits * ~np.eye(ranks, dtype=bool)
    flat = Rows(*((pairs * part).sum(axis=axis) for part in (~inside, inside) for axis in (1, 0)))
    crossings[np.arange(ranks), node] = 0
    crossed = crossings.reshape(nodes, gpus, nodes)
    # By position of the source, which is where rows land on every node, and by node and position of the target.
    landed = hits.reshape(nodes, gpus, nodes, gpus).sum(axis=0)
    landed[np.arange(gpus), :, np.arange(gpus)] = 0
    hierarchical = Rows(
        crossed.sum(axis=2).reshape(-1),
        crossed.sum(axis=0).T.reshape(-1),
        landed.sum(axis=2).T.reshape(-1),
        landed.sum(axis=0).reshape(-1),
    )
    return dict(zip(WAYS, (flat, hierarchical), strict=True))


def seconds(rows: Rows, way: str, *, tokens: int, row_bytes: int, topology: Topology, rates: Rates) -> float:
    """Return the seconds of one all-to-all of the busiest GPU on either leg; `rows` are for each token."""
    nic, link = tokens * row_bytes * rows.nic / rates.nic, tokens * row_bytes * rows.link / rates.link
    peers = topology.num_ranks - topology.gpus_per_node if way == "flat" else topology.num_nodes - 1
    nic += peers * rates.message
    if way == "flat" or topology.num_nodes == 1:
        return rates.start + max(nic, link)
    return 2 * rates.start + max(nic, link) + min(nic, link) / rates.blocks


def _on_ranks(slots: np.ndarray, topology: Topology) -> np.ndarray:
    """Return `[M, W]` whether a token `[M, K]` has a slot on a rank."""
    found = np.zeros((len(slots), topology.num_ranks + 1), bool)
    ranks = np.where(slots < 0, topology.num_ranks, slots // (topology.num_slots // topology.num_ranks))
    found[np.arange(len(slots))[:, None], ranks] = True
    return found[:, :-1]
