"""Run deployments in the checkout that contains the worker's package ``flows``.

prefect.yaml names ``enter_checkout`` as the pull step of every deployment. Nothing is cloned: a worker keeps its
checkout, with its outputs, caches and environment.
"""

import os
from pathlib import Path


def enter_checkout() -> dict[str, str]:
    """Make the worker's checkout the working directory of the run."""
    checkout = Path(__file__).resolve().parents[1]
    os.chdir(checkout)
    return {"directory": str(checkout)}
