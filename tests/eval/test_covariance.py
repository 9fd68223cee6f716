import numpy as np
import pytest
import torch

from eval.covariance import Covariance, components_needed, effective_rank, explained_variance


def spectrum(vectors, batch=None):
    covariance = Covariance(vectors.shape[1])
    for rows in torch.as_tensor(vectors).split(batch or len(vectors)):
        covariance.add(rows)
    return covariance.eigenvalues()


def test_orthogonal_columns_of_equal_norm_have_full_effective_rank():
    signs = torch.tensor([[1.0]])
    for _ in range(4):  # Sylvester's construction: a 16 x 16 Hadamard matrix
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    eigenvalues = spectrum(signs[:, 1:])  # all but the constant column: centred, orthogonal, equal norms; d = 15
    assert effective_rank(eigenvalues) == pytest.approx(15, abs=1e-10)
    assert explained_variance(eigenvalues, 5) == pytest.approx(5 / 15, abs=1e-12)
    assert explained_variance(eigenvalues, 2) == pytest.approx(2 / 15, abs=1e-12)
    assert components_needed(eigenvalues, 0.9) == 14  # 13/15 = 0.867, 14/15 = 0.933
    assert components_needed(eigenvalues, 12 / 15) == 12


def test_a_line_has_rank_one():
    line = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)) @ torch.ones(1, 24) + 5
    eigenvalues = spectrum(line)
    assert effective_rank(eigenvalues) == pytest.approx(1, abs=1e-5)
    assert explained_variance(eigenvalues, 5) == pytest.approx(1, abs=1e-7)
    assert components_needed(eigenvalues) == 1


@pytest.mark.parametrize("batch", [1, 7, 64, 500])
def test_equals_numpy_on_the_stored_array_whatever_the_batches(batch):
    rng = np.random.default_rng(1)
    vectors = (rng.standard_normal((500, 32)) * np.linspace(3, 0.01, 32) + 1000).astype(np.float32)  # far from the origin
    expected = np.linalg.eigvalsh(np.cov(vectors.astype(np.float64), rowvar=False, bias=True))[::-1]
    eigenvalues = spectrum(vectors, batch)
    np.testing.assert_allclose(eigenvalues, expected, rtol=1e-9, atol=1e-12)
    shares = expected / expected.sum()
    assert effective_rank(eigenvalues) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-9)
    assert explained_variance(eigenvalues, 5) == pytest.approx(shares[:5].sum(), rel=1e-9)


def test_components_are_the_principal_directions():
    vectors = np.random.default_rng(2).standard_normal((300, 8)) * np.arange(8, 0, -1)
    covariance = Covariance(8)
    covariance.add(torch.as_tensor(vectors))
    right = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)[2]
    np.testing.assert_allclose(np.abs((covariance.components(3) * right[:3]).sum(1)), 1, rtol=1e-9)


def test_merging_processes_equals_one_process():
    vectors = torch.randn(90, 6, generator=torch.Generator().manual_seed(3)).double() + 40
    whole = Covariance(6)
    whole.add(vectors)
    parts = [Covariance(6) for _ in range(3)]  # the third has nothing
    parts[0].add(vectors[:17])
    parts[1].add(vectors[17:])
    merge(parts)
    for part in parts:
        assert part.n == 90
        np.testing.assert_allclose(part.eigenvalues(), whole.eigenvalues(), rtol=1e-12)


def merge(parts):
    """Runs `reduce` on all parts as an all-reduce would: the k-th call of each is summed over the parts."""
    import threading

    barrier, slots = threading.Barrier(len(parts)), {}

    def run(index):
        def reduce(tensor):
            slots[index] = tensor.clone()
            barrier.wait()
            total = sum(slots[other] for other in sorted(slots))
            barrier.wait()
            tensor.copy_(total)

        parts[index].reduce(reduce)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("vectors", [torch.empty(0, 4), torch.ones(1, 4), torch.full((50, 4), 0.1), torch.full((9, 4), torch.nan)])
def test_without_spread_there_is_no_spectrum(vectors):
    covariance = Covariance(4)
    covariance.add(vectors)
    eigenvalues = covariance.eigenvalues()
    assert eigenvalues is None
    assert effective_rank(eigenvalues) is explained_variance(eigenvalues, 5) is components_needed(eigenvalues) is None


def test_few_vectors_are_labelled():
    vectors = torch.randn(100, 768, generator=torch.Generator().manual_seed(4))
    covariance = Covariance(768)
    covariance.add(vectors)
    assert covariance.few
    assert effective_rank(covariance.eigenvalues()) == pytest.approx(93, abs=2)  # isotropic in 768 dimensions: measures n, not d
    enough = Covariance(2)
    enough.add(vectors[:20, :2])
    assert not enough.few
