import numpy as np

from tasks.parts.latency import bootstrap_interval


def test_bootstrap_interval_covers_the_median_about_as_often_as_it_says():
    random = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        low, high = bootstrap_interval(random.lognormal(0, 0.1, 25), seed=seed)
        hits += low <= 1 <= high
    assert 0.88 <= hits / 200 <= 0.99
