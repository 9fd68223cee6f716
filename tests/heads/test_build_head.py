import pytest
import torch

from heads import HEADS, build_head


def test_unknown_names_and_options_list_what_exists():
    with pytest.raises(ValueError, match="'cosin'.*cosine.*mahalanobis"):
        build_head("cosin", 8, 16)
    with pytest.raises(ValueError, match="'?p'?; it has: .*covariance"):
        build_head("mahalanobis", 8, 16, p=2.0)
    with pytest.raises(ValueError, match="exponent; it has: bias"):
        build_head("linear", 8, 16, exponent=3.0)


@pytest.mark.parametrize("name", HEADS)
def test_none_is_unset_and_options_rebuild_the_head(name):
    bare = build_head(name, 8, 16)
    unset = build_head(name, 8, 16, **{key: None for key in bare.options()})
    again = build_head(name, 8, 16, **bare.options())
    assert bare.options() == unset.options() == again.options()


@pytest.mark.parametrize("name, options, argument", [
    ("euclidean", {"exponent": 0}, "exponent"), ("euclidean", {"exponent": -1.0}, "exponent"),
    ("euclidean", {"exponent": "large"}, "exponent"),
    ("euclidean", {"exponent": float("nan")}, "exponent"), ("cosine", {"link": "softmax"}, "link"),
    ("cosine", {"link": "gibbs", "tau": 0}, "tau"), ("cosine", {"link": "gibbs", "exponent": 3.0}, "exponent"),
    ("cosine", {"link": "gibbs", "learn_exponent": True}, "learn_exponent"), ("cosine", {"tau": 0.5}, "tau"),
    ("cosine", {"exponent_spread": 0}, "exponent_spread"), ("cosine", {"hidden_scale": -2}, "hidden_scale"),
    ("cosine", {"learn_exponent": 1}, "learn_exponent"), ("minkowski", {"p": 0.5}, "p 0.5"), ("minkowski", {"p": float("nan")}, "p nan"),
    ("hamming", {"temperature": 0.0}, "temperature"), ("hamming", {"relaxation": "none"}, "relaxation"),
    ("chebyshev", {"smooth": -1.0}, "smooth"), ("canberra", {"min_denominator": -1}, "min_denominator"),
    ("bray_curtis", {"normalized": "yes"}, "normalized"), ("mahalanobis", {"covariance": "banded"}, "covariance"),
    ("linear", {"bias": 3}, "bias"),
])
def test_bad_values_name_the_argument(name, options, argument):
    with pytest.raises(ValueError, match=argument):
        build_head(name, 8, 16, **options)


def test_sizes():
    for sizes in ((0, 16), (8, 0), (8, 16, 15)):
        with pytest.raises(ValueError, match="n_embd|vocab_size"):
            build_head("cosine", *sizes)
    assert build_head("cosine", 8, 16, 64).weight.shape == (64, 8)
    assert build_head("cosine", 8, 16).weight.shape == (16, 8)


def test_untied_prototypes_come_from_the_default_generator():
    torch.manual_seed(3)
    first = build_head("manhattan", 64, 999).weight
    torch.manual_seed(3)
    head = build_head("manhattan", 64, 999)
    assert torch.equal(first, head.weight) and abs(first.std().item() - head.init_std) < 0.02
