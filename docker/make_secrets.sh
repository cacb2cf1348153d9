#!/bin/sh
# Write a random password for each secret of compose.yaml that has none yet, into docker/secrets or the given folder.
set -eu
folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
chmod 700 "$folder"
for name in postgres_password prefect_database_password prefect_auth_string mlflow_database_password \
    mlflow_admin_password mlflow_worker_password mlflow_session_key s3_secret_key; do
    if [ ! -s "$folder/$name" ]; then
        prefix=
        [ "$name" != prefect_auth_string ] || prefix=enginewright:  # it is user:password
        printf '%s' "$prefix$(head -c 24 /dev/urandom | base64 | tr '+/' '-_')" > "$folder/$name"
        chmod 444 "$folder/$name"  # containers read it as other users; on this machine the folder is closed to them
    fi
done
