"""Names of tensors in the files of others."""

import pytest
import torch

from tasks.parts.networks.weights_file import without_wrappers

OWN = ("body.weight", "body.bn.num_batches_tracked", "model.head.weight")


@pytest.mark.parametrize(
    "prefix", ["", "module.", "module._orig_mod.", "model._orig_mod.", "_orig_mod.", "network."]
)
@pytest.mark.parametrize("others", [(), ("criterion.weight",), ("n_averaged",)])
@pytest.mark.parametrize("is_known", [True, False])
def test_wrappers_are_stripped(prefix: str, others: tuple[str, ...], is_known: bool) -> None:
    known = OWN if is_known else ()
    names = {f"{prefix}{name}" for name in OWN if "num_batches" not in name} | {*others}
    found = set(without_wrappers(dict.fromkeys(names, torch.zeros(1)), known))
    stays = "criterion.weight" in others and (not prefix or not is_known)
    if stays and prefix:
        assert found == names, "what belongs to the network is not known"
    else:
        assert found == {"body.weight", "model.head.weight"} | ({"criterion.weight"} if stays else set())
