import pytest
import torch

from heads.links import Gibbs, Harmonic, Identity, distance, log_distance


@pytest.mark.parametrize("with_ratio", [False, True])
@pytest.mark.parametrize("link", [Harmonic(), Harmonic(0.5), Harmonic(1 / 3, 0.1), Gibbs(), Gibbs(0.5), Gibbs(1.0, 0.1)], ids=str)
def test_logits_and_their_derivatives(link, with_ratio):
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(3, 5, generator=generator, dtype=torch.float64) + 0.2
    ratio = torch.rand(3, 5, generator=generator, dtype=torch.float64) + 0.2 if with_ratio else None
    sharpness, grad = torch.tensor(7.0, dtype=torch.float64), torch.randn(3, 5, generator=generator, dtype=torch.float64)
    leaves = [part.requires_grad_() for part in (u.clone(), None if ratio is None else ratio.clone()) if part is not None]
    d = link.factor * leaves[0] ** link.root / (leaves[1] if with_ratio else 1)
    z = -sharpness * (d if isinstance(link, Gibbs) else d.log())
    expected = torch.autograd.grad((grad * z).sum(), leaves)
    torch.testing.assert_close(distance(link, u, ratio), d.detach())
    torch.testing.assert_close(log_distance(link, u, ratio), d.detach().log())
    torch.testing.assert_close(torch.softmax(link.logits(u.clone(), ratio, sharpness), 1), torch.softmax(z.detach(), 1))
    for place in ("grad", "u", "elsewhere"):
        copies = {"grad": grad.clone(), "u": u.clone(), "elsewhere": torch.empty_like(u)}
        grad_ratio = link.pull(copies["grad"], copies["u"], ratio, out=copies[place])
        assert (grad_ratio is None) == (ratio is None)
        for actual, wanted in zip((copies[place], grad_ratio), expected):
            torch.testing.assert_close(actual * link.slope(sharpness), wanted)


def test_identity():
    u = torch.randn(2, 3)
    assert Identity().logits(u, None, None) is u and Identity().slope(None) == 1
    grad, out = torch.randn(2, 3), torch.empty(2, 3)
    assert Identity().pull(grad, u, None, out) is None and torch.equal(out, grad)
