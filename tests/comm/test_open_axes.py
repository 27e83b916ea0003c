"""Process groups are opened while another rank may end."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from paceline.comm.collectives import open_axes
from paceline.comm.ledger import Ledger
from paceline.nouns.errors import PeerLostError
from paceline.nouns.mesh import Mesh


def test_open_axes_reports_a_rank_that_ends_while_others_connect(monkeypatch):
    """What Gloo says then; seen where one rank could not open its data."""

    def connection_closed(ranks):
        raise RuntimeError(
            "Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [127.0.0.1]:17635."
        )

    monkeypatch.setattr(dist, "new_group", connection_closed)
    with pytest.raises(PeerLostError) as caught:
        open_axes(Mesh.parse("replicate=2,shard=2"), 0, Ledger())
    assert "opening the process groups" in caught.value.asked
    assert "look for the rank that failed first" in caught.value.fix
