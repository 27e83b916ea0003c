import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.nouns.errors import MeshError
from paceline.nouns.mesh import AXES, Mesh


@given(st.tuples(*[st.integers(1, 3)] * len(AXES)))
def test_every_rank_has_one_place_and_one_group_per_axis(sizes):
    mesh = Mesh(sizes)
    size = mesh.world_size
    assert len({tuple(mesh.coordinate(rank).items()) for rank in range(size)}) == size
    for axis in AXES:
        assert all(rank in mesh.peers(rank, axis) for rank in range(size))
        assert len({mesh.peers(rank, axis) for rank in range(size)}) * mesh.size(axis) == size


@given(st.tuples(*[st.integers(1, 3)] * len(AXES)))
def test_mesh_random_stream_is_shared_by_equal_stage_and_samples(sizes):
    mesh = Mesh(sizes)
    places = {}
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        place = (at["pipeline"], mesh.data_part(rank))
        assert places.setdefault(mesh.random_stream(rank), place) == place
        if at["pipeline"] == 0:
            assert mesh.random_stream(rank) == mesh.data_part(rank)
    assert sorted(places) == list(range(mesh.size("pipeline") * mesh.data_size))


def test_the_fields_short_word_is_shown_as_the_long_name():
    assert str(Mesh.parse("dp=4")) == "replicate=4"
    assert str(Mesh.parse("replicate=1")) == "replicate=1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replicat=2", "did you mean 'replicate'"),
        ("replicate=0", "write replicate=1 to leave it unused"),
        ("replicate=two", "a size is a whole number above 0"),
        ("replicate=2,dp=4", "keep one of replicate=2 and replicate=4"),
    ],
)
def test_a_wrong_mesh_says_how_to_mend_it(text, said):
    with pytest.raises(MeshError, match=said):
        Mesh.parse(text)


def test_the_message_has_three_parts_and_where_it_happened():
    with pytest.raises(MeshError) as caught:
        Mesh.parse("replicate=4").check_fits(6)
    assert str(caught.value.at(rank=0, step=2)) == (
        "[rank 0, step 2] the mesh replicate=4 covers 4 ranks\n  found: the job has 6 ranks\n"
        "  fix: write --plan replicate=6, or start 4 ranks with -n 4"
    )
