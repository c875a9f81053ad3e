"""What may stand for a compression: settings, as plans have it, or text."""

import pytest

from gradweave import Compression, Densities, GTopK, RequestError, TopK
from gradweave._src.sparse.settings import settings_of


def test_the_density_needs_no_name():
    assert GTopK(0.001) == GTopK(density=0.001)
    assert TopK(0.01, momentum=0.5) == TopK(density=0.01, momentum=0.5)
    densities = Densities(steps_each=3)
    assert GTopK(densities).density == densities
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        GTopK(0.001, "gtopk")
    with pytest.raises(RequestError, match="density"):
        GTopK(2.0)


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (GTopK(0.5, dense_below=7), GTopK(0.5, dense_below=7)),
        ("gtopk:0.001", GTopK(0.001)),
        ("gtopk", GTopK(0.001)),
        ("gtopk-tree:0.25", GTopK(0.25, exchange="gtopk-tree")),
        ("topk:0.5", TopK(0.5)),
        (Compression(method="topk", density=0.5), TopK(0.5)),
    ],
)
def test_each_of_them_means_settings(given, settings):
    found = settings_of(given)
    assert found == settings
    assert type(found) is type(settings)


def test_topk_has_one_exchange():
    assert TopK(0.5).exchange == "topk"
    with pytest.raises(TypeError, match="unexpected keyword argument 'exchange'"):
        TopK(0.5, exchange="topk")
