"""``python -m tasks.core.tracking``: send what MLflow did not take to where params.yaml says."""

import logging
import sys

from tasks.core.errors import EnginewrightError, TrackingUnavailable
from tasks.core.tracking.config import read_tracking_config
from tasks.core.tracking.pending import describe_pending, send_pending

logger = logging.getLogger(__name__)


def main() -> int:
    """Send what is pending to where params.yaml says; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        num_added = send_pending(read_tracking_config())
    except TrackingUnavailable as error:
        logger.error("%s %s", error, describe_pending())
        return 1
    except EnginewrightError as error:
        logger.error("%s", error)
        return 1
    logger.info("MLflow has %d runs that were pending", num_added)
    return 0


if __name__ == "__main__":
    sys.exit(main())
