"""Send pending runs to MLflow: ``python -m tasks.core.tracking``."""

import logging
import sys

from tasks.core.errors import EnginewrightError, TrackingUnavailable
from tasks.core.tracking.config import read_tracking_config
from tasks.core.tracking.pending import describe_pending, send_pending

logger = logging.getLogger(__name__)


def main() -> int:
    """Send pending runs to the MLflow that params.yaml names; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        num_added = send_pending(read_tracking_config())
    except TrackingUnavailable as error:
        logger.error("%s %s", error, describe_pending())
        return 1
    except EnginewrightError as error:
        logger.error("%s", error)
        return 1
    logger.info("sent %d pending runs to MLflow", num_added)
    return 0


if __name__ == "__main__":
    sys.exit(main())
