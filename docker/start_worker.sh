#!/bin/sh
# Start a Prefect worker for WORK_POOL in its own checkout; artifacts are exchanged through DVC_REMOTE.
set -eu
cd "${WORKSPACE:-/workspace}"
if [ ! -d .git ]; then
    git clone --quiet "$REPOSITORY" .
fi
dvc remote add --quiet --local --force --default store "$DVC_REMOTE"
exec prefect worker start --type process --pool "$WORK_POOL" --limit 1 --with-healthcheck
